"""An sbatch script: one task a rank, and a job that queues itself again when its run was asked to stop.

Slurm sends USR1 to the ranks some time before the job's limit, and SIGTERM when it preempts the job. Either way the run
saves and ends with 75, and the script queues the job again: in the next attempt Slurm sets SLURM_RESTART_COUNT, by
which the run knows to go on.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.errors import ConfigError
from meshwright.launch.signals import STOPPED_EXIT_CODE
from meshwright.section import Positive, shown
from meshwright.tools.submit.job import Engine, Submission, in_form

_SCRIPT = """#!/bin/bash
{directives}
{setup}
# Without pipefail and the like: the code of srun is what decides below.
set -u

# Ranks leave one after the other: the first one's code must not end the others, nor may they stay for ever.
srun --kill-on-bad-exit=0 --wait={wait}{options} {words}
code=$?

# {stopped}: the run was asked to stop, has finished its step and saved. It is queued again, and goes on from there.
if [ "$code" -eq {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_WAIT_SECONDS = 60
"""How long ranks may stay after the first one has ended. A rank that lost another ends by itself, within seconds."""

_SETTLED = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "the layout and --nodes"),
    **dict.fromkeys(("signal", "requeue", "no-requeue", "open-mode"), "how a stopped run is queued again"),
}
"""Options of sbatch that are not the user's, and by what they are decided."""

_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-node", "tres-per-task")


class Slurm(Engine):
    """A script for sbatch."""

    shares_folders: ClassVar[bool] = True
    suffix: ClassVar[str] = ".sbatch"

    time: Annotated[
        str,
        in_form(r"(\d+-)?\d+(:\d\d){0,2}", "is no limit of Slurm's, such as 90 (minutes), 04:00:00 or 1-12:00:00"),
    ] = "01:00:00"
    """The job's limit."""
    grace: Positive = 120
    """Seconds before the limit at which the run is asked to save."""
    partition: str | None = None
    """The partition."""
    account: str | None = None
    """The account."""
    sbatch: dict[str, str] = Field(default_factory=dict)
    """Any option of sbatch: sbatch.qos=high, sbatch.mem=0, sbatch.exclusive= (one without a value)."""
    setup: tuple[str, ...] = ()
    """A line of shell before the run, such as source env.sh. Repeat it for more."""
    container: str | None = None
    """A container image in which the ranks run."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """The program that runs the container: srun's plug-in Pyxis (with Enroot), or Apptainer."""
    mounts: tuple[str, ...] = ()
    """A folder that the container sees, SOURCE or SOURCE:TARGET, besides the run's. Repeat it for more."""
    logs: Path = Path()
    """The folder of the job's log, JOB-NUMBER.log; it is made."""
    mpi: str | None = None
    """srun's --mpi, such as pmix."""
    python: str | None = None
    """The interpreter; this one, or `python` of a container or after setup lines."""

    @property
    def log_folder(self) -> Path | None:
        return self.logs

    def text(self, submission: Submission) -> str:
        options, words = self._ranks(submission)
        setup = [*self.setup]
        if self.container:
            setup.append(shlex.join(["mkdir", "-p", str(submission.out.parent)]))  # what is mounted must be there
        return _SCRIPT.format(
            directives="\n".join(self._directives(submission)),
            setup="".join(f"\n{line}" for line in setup) + ("\n" if setup else ""),
            wait=_WAIT_SECONDS,
            options="".join(f" {option}" for option in options),
            words=shlex.join(words),
            stopped=STOPPED_EXIT_CODE,
        )

    def command(self, file: Path, name: str) -> list[str]:
        return ["sbatch", str(file)]

    def _directives(self, submission: Submission) -> list[str]:
        per_node = submission.ranks_per_node
        wants_gpus = submission.uses_gpus and not any(option in self.sbatch for option in _GPU_OPTIONS)
        options = {
            "job-name": submission.name,
            "nodes": submission.nodes,
            "ntasks-per-node": per_node,
            # Blocks of ranks share a node, as the layout's innermost axes want it.
            "distribution": "block",
            "cpus-per-task": self.cpus,
            "gpus-per-node": per_node if wants_gpus else None,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "signal": f"USR1@{self.grace}",
            "requeue": "",
            "open-mode": "append",
            "output": str(self.logs / "%x-%j.log"),
        }
        for key, value in self.sbatch.items():
            if key in _SETTLED:
                raise ConfigError.of(f"sbatch.{key}", value, f"is not yours: {_SETTLED[key]} decides it")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or "\n" in value:
                raise ConfigError.of(f"sbatch.{key}", value, "is no long option of sbatch", "sbatch.qos=high")
            options[key] = value
        return [
            f"#SBATCH --{key}" + (f"={value}" if value != "" else "")
            for key, value in options.items()
            if value is not None
        ]

    def _ranks(self, submission: Submission) -> tuple[list[str], list[str]]:
        """srun's further options, and the command of a rank, in its container if there is one."""
        # This interpreter's path is valid on nodes with shared folders as well.
        inside = "python" if self.container or self.setup else sys.executable
        words = submission.train_words(self.python or inside, submission.run.absolute(), resume=False)
        options = [] if self.mpi is None else [f"--mpi={self.mpi}"]
        if self.container is None:
            # No setting without an effect.
            for idle in sorted({"mounts", "runtime"} & self.model_fields_set):
                raise ConfigError.of(idle, shown(getattr(self, idle)), "has no effect without a container")
            return options, words
        # Under the same paths as outside: the run file, and what it names, are found by both.
        folders = dict.fromkeys([str(submission.run.absolute().parent), str(submission.out.parent), *self.mounts])
        mounts = ",".join(folder if ":" in folder else f"{folder}:{folder}" for folder in folders)
        if self.runtime == "pyxis":
            container = [f"--container-image={self.container}", f"--container-mounts={mounts}"]
            return [*options, *map(shlex.quote, container)], words
        gpus = ["--nv"] if submission.uses_gpus else []
        return options, ["apptainer", "exec", *gpus, "--bind", mounts, self.container, *words]
