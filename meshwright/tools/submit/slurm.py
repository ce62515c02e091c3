"""An sbatch script: one task a rank, and a job that queues itself again when its run was asked to stop.

Slurm sends USR1 to the ranks some time before the job's limit, and SIGTERM when it preempts the job. Either way the run
saves and ends with 75, and the script queues the job again: in the next attempt Slurm sets SLURM_RESTART_COUNT, by
which the run knows to go on.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from meshwright.launch.signals import STOPPED_EXIT_CODE
from meshwright.section import Positive
from meshwright.tools.submit.job import JobSettings, Submission, own_python

_SCRIPT = """#!/bin/bash
{directives}
# Without pipefail and the like: the code of srun is what decides below.
set -u

# Ranks leave one after the other: the first one's code must not end the others, nor may they stay for ever.
srun --kill-on-bad-exit=0 --wait={wait}{mpi} {words}
code=$?

# {stopped}: the run was asked to stop, has finished its step and saved. It is queued again, and goes on from there.
if [ "$code" -eq {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_WAIT_SECONDS = 60
"""How long ranks may stay after the first one has ended. A rank that lost another ends by itself, within seconds."""


def _limit(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", text):
        raise ValueError("is no limit of Slurm's, such as 90 (minutes), 04:00:00 or 1-12:00:00")
    return text


class Slurm(JobSettings):
    """`time`: the job's limit. `grace`: seconds before it at which the run is asked to save. `mpi`: srun's --mpi."""

    shares_folders: ClassVar[bool] = True
    suffix: ClassVar[str] = ".sbatch"

    time: Annotated[str, AfterValidator(_limit)] = "01:00:00"
    grace: Positive = 120
    partition: str | None = None
    account: str | None = None
    mpi: str | None = None
    python: str | None = None

    def text(self, submission: Submission) -> str:
        per_node = submission.ranks_per_node
        options = {
            "job-name": submission.name,
            "nodes": submission.nodes,
            "ntasks-per-node": per_node,
            # Blocks of ranks share a node, as the layout's innermost axes want it.
            "distribution": "block",
            "cpus-per-task": self.cpus,
            "gpus-per-node": per_node if submission.uses_gpus else None,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "signal": f"USR1@{self.grace}",
            "requeue": "",
            "open-mode": "append",
            "output": "%x-%j.log",
        }
        lines = [f"#SBATCH --{key}" + (f"={value}" if value != "" else "") for key, value in options.items()
                 if value is not None]  # fmt: skip
        words = submission.train_words(self.python or own_python(), submission.run.absolute(), resume=False)
        mpi = "" if self.mpi is None else f" --mpi={self.mpi}"
        return _SCRIPT.format(
            directives="\n".join(lines), wait=_WAIT_SECONDS, mpi=mpi, words=shlex.join(words), stopped=STOPPED_EXIT_CODE
        )

    def command(self, file: Path) -> list[str]:
        return ["sbatch", str(file)]
