"""A Python script for Ray, which `ray job submit --working-dir .` ships with the run file. It calls ray_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from meshwright.errors import ConfigError
from meshwright.section import Count, Positive
from meshwright.tools.submit.job import Engine, Submission
from meshwright.tools.submit.ray_ranks import RUN

_SCRIPT = '''"""Places the ranks of {name} on a Ray cluster. It reads the run file from the folder that it runs in."""

import sys

from meshwright.tools.submit.ray_ranks import Placement, place_ranks

PLACEMENT = Placement(
    run={run!r},
    words={words!r},
    nodes={nodes},
    ranks_per_node={per_node},
    cpus={cpus},
    gpus={gpus},
    restarts={restarts},
)

if __name__ == "__main__":
    sys.exit(place_ranks(PLACEMENT))
'''


STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray kills a job so many seconds after it was asked to stop; 3 by default, in which few runs save."""


def script_text(submission: Submission, run: str, cpus: int, restarts: int) -> str:
    """The script. `run`: the run file, as the script finds it."""
    return _SCRIPT.format(
        name=submission.name,
        run=run,
        # Without the interpreter, which each node has its own of; always with --resume, as a placed rank does not know
        # whether others were before it.
        words=submission.train_words("", RUN, resume=True)[1:],
        nodes=submission.nodes,
        per_node=submission.ranks_per_node,
        cpus=cpus,
        gpus=int(submission.uses_gpus),
        restarts=restarts,
    )


class Ray(Engine):
    """A script for `ray job submit`, which ships the folder that it is called in."""

    shares_folders: ClassVar[bool] = False
    suffix: ClassVar[str] = "_ray.py"

    grace: Positive = 300
    """Seconds that `ray job stop` leaves the run to save."""
    restarts: Count = 3
    """How often ranks that were lost are placed again."""

    def text(self, submission: Submission) -> str:
        if not submission.out.is_absolute():
            rule = "lies in the folder that Ray ships, which is another for each job and node"
            raise ConfigError.of(
                "--out", submission.out, rule, f"a folder that all nodes see, /shared/{submission.name}"
            )
        return script_text(submission, _shipped("RUN.yaml", submission.run), self.cpus, self.restarts)

    def command(self, file: Path, name: str) -> list[str]:
        environment = json.dumps({"env_vars": {STOP_VARIABLE: str(self.grace)}})
        options = ["--no-wait", "--working-dir", ".", "--runtime-env-json", environment]
        return ["ray", "job", "submit", *options, "--", "python", _shipped("--to", file)]


def _shipped(field: str, file: Path) -> str:
    """The file's path within the folder that is shipped. Raises ConfigError where it lies outside."""
    here = Path.cwd()
    if not file.resolve().is_relative_to(here):
        raise ConfigError.of(field, file, f"does not lie in {here}, the folder that Ray ships", "a file in it")
    return str(file.resolve().relative_to(here))
