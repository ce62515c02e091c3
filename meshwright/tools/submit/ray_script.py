"""A Python script for Ray, shipped by `ray job submit --working-dir .`; the script calls ray_ranks.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

from meshwright.config.section import Count, Positive
from meshwright.ranks.errors import ConfigError
from meshwright.tools.submit.job import SAFE_PATH, Engine, Submission
from meshwright.tools.submit.ray_ranks import RUN

_SCRIPT = '''"""Places the ranks of {name} on a Ray cluster."""

import os
import sys

# Ray searches the folder that it ships for modules: names in it must not stand for those of Python and torch.
sys.path[:] = [place for place in sys.path if os.path.realpath(place) != os.path.realpath(os.getcwd())]

from meshwright.tools.submit.ray_ranks import Placement, place_ranks

PLACEMENT = Placement(
    {run},
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
"""Seconds between Ray's request to stop a job and the kill; 3 by default, too short for most runs to save."""


def script_text(submission: Submission, cpus: int, restarts: int, file: str = "") -> str:
    """Return the script.

    Args:
        submission: The run.
        cpus: Cores of a rank.
        restarts: How many times the ranks may be placed again.
        file: The run file's path on the script's node; if empty, the script contains the run file's text.
    """
    lines = "".join(f"\n        {line!r}" for line in submission.run_text.splitlines(keepends=True))
    return _SCRIPT.format(
        name=submission.name,
        run=f"file={file!r}" if file else f"run=({lines}\n    )",
        # Without the interpreter: each node uses its own.
        words=submission.train_words("", RUN)[1:],
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
        return script_text(submission, self.cores(submission), self.restarts)

    def command(self, file: Path, name: str) -> list[str]:
        here = Path.cwd()
        # `ray job submit` joins the words to one line for the head's shell, but quotes by the rules of Windows.
        if not re.fullmatch(r"[\w ./+@=,:-]+", str(file)):
            raise ConfigError.of("--to", file, "has a character that a shell would read", "letters, digits and . _ - /")
        if not file.resolve().is_relative_to(here):
            raise ConfigError.of("--to", file, f"does not lie in {here}, the folder that Ray ships", "a file in it")
        environment = json.dumps({"env_vars": {STOP_VARIABLE: str(self.grace), SAFE_PATH: "1"}})
        options = ["--no-wait", "--working-dir", ".", "--runtime-env-json", environment]
        return ["ray", "job", "submit", *options, "--", "python", str(file.resolve().relative_to(here))]
