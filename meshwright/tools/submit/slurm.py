"""An sbatch script: one task per rank; the job queues itself again after its run was stopped.

Slurm sends USR1 to the ranks some time before the job's limit, and SIGTERM on preemption. In both cases the run saves
and ends with code 75, and the script queues the job again. The ranks' command always has --resume, so a job that Slurm
or a person starts again resumes.

The script needs no file of the machine that wrote it: the script contains the run file and writes a copy next to the
run.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import sys
from itertools import count
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.config.section import Positive, shown
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.launch.signals import STOPPED_EXIT_CODE
from meshwright.tools.submit.forms import directive_word, in_form
from meshwright.tools.submit.job import SAFE_PATH, Engine, Submission

_SCRIPT = """#!/bin/bash
{directives}
# The interpreter of the ranks: {interpreter}
{setup}
# Without pipefail and the like: the code of srun is what decides below.
set -u
# Python does not search the current folder for modules.
export {safe_path}=1

# The run file, as it was when this script was written.
mkdir -p {folder} || exit 1
cat > {run} <<'{mark}'
{run_text}
{mark}

# --cpus-per-task again: since Slurm 22.05 srun does not inherit it (sbatch's manual). Ranks leave one after the other:
# the first one's code must not end the others, nor may they stay for ever.
srun --cpus-per-task={cores} --kill-on-bad-exit=0 --wait={wait}{options} {words}
code=$?

# {stopped}: the run was asked to stop, has finished its step and saved. It is queued again, and goes on from there.
if [ "$code" -eq {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_WAIT_SECONDS = 60
"""Seconds that ranks may run after the first one has ended. A rank that lost another ends by itself within seconds."""

_SETTLED = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "the layout and --nodes"),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "--set cpus, of sbatch and of srun,"),
    **dict.fromkeys(("signal", "requeue", "no-requeue", "open-mode"), "how a stopped run is queued again"),
    **dict.fromkeys(("array", "wrap"), "one script for one run"),
}
"""Options of sbatch that the user cannot set, and the cause that decides each."""

_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-node", "tres-per-task")

Names = Annotated[
    str, in_form(r"[\w.+:@/-]+(,[\w.+:@/-]+)*", "is no name of Slurm's: letters, digits and _ . + : @ / -, no blank")
]


class Slurm(Engine):
    """A script for sbatch."""

    shares_folders: ClassVar[bool] = True
    suffix: ClassVar[str] = ".sbatch"

    time: Annotated[
        str,
        in_form(r"([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}", "is no limit of Slurm's, such as 90 (minutes) or 1-12:00:00"),
    ] = "01:00:00"
    """The job's limit."""
    grace: Positive = 120
    """Seconds before the limit at which the run is asked to save."""
    partition: Names | None = None
    """The partition."""
    account: Names | None = None
    """The account."""
    sbatch: dict[str, str] = Field(default_factory=dict)
    """Any option of sbatch: sbatch.qos=high, sbatch.mem=0, sbatch.exclusive= (one without a value)."""
    setup: tuple[str, ...] = ()
    """A line of shell before the run, such as source env.sh. Repeat it for more."""
    container: str | None = None
    """A container image in which the ranks run."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """The program that runs the container: srun's plug-in Pyxis (with Enroot), or Apptainer."""
    mounts: tuple[Annotated[str, in_form(r"[^:,]+(:[^:,]+){0,2}", "is no SOURCE or SOURCE:TARGET")], ...] = ()
    """A folder that the container sees, SOURCE or SOURCE:TARGET, besides the run's. Repeat it for more."""
    logs: Path = Path()
    """The folder of the job's log, JOB-NUMBER.log; it is made if it can be made here."""
    mpi: Annotated[str, in_form(r"[\w./+-]+", "is no plug-in of srun --mpi, such as pmix")] | None = None
    """srun's --mpi, such as pmix."""
    python: str | None = None
    """The interpreter on the nodes; python, but on a machine with sbatch and without setup or container this one."""

    def out_of(self, out: Path | None, run: Path) -> Path:
        """Return the run's folder, absolute on a machine with sbatch, whose folders the nodes see.

        On other machines the path is kept: it names a folder of the cluster.
        """
        out = super().out_of(out, run)
        return out.absolute() if _submits_here() else out

    def prepare(self) -> list[str]:
        """Make the log's folder: Slurm does not, and without the folder a job fails silently."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            asked = shlex.join(["mkdir", "-p", str(self.logs)])
            return [f"the folder of the log cannot be made here ({error.strerror}): before sbatch, {asked}"]
        return []

    def text(self, submission: Submission) -> str:
        run = submission.out.parent / f"{submission.out.name}.run.yaml"
        python, said = self.interpreter()
        options, words = self._ranks(submission, run, python)
        run_text = submission.run_text.removesuffix("\n")
        lines = set(run_text.splitlines())
        return _SCRIPT.format(
            directives="\n".join(self._directives(submission)),
            interpreter=said,
            setup="".join(f"\n{line}" for line in self.setup) + ("\n" if self.setup else ""),
            safe_path=SAFE_PATH,
            folder=shlex.quote(str(run.parent)),
            run=shlex.quote(str(run)),
            run_text=run_text,
            mark=next(mark for suffix in count() if (mark := f"END_OF_RUN_FILE_{suffix}") not in lines),
            cores=self.cores(submission),
            wait=_WAIT_SECONDS,
            options="".join(f" {shlex.quote(option)}" for option in options),
            words=shlex.join(words),
            stopped=STOPPED_EXIT_CODE,
        )

    def command(self, file: Path, name: str) -> list[str]:
        return ["sbatch", str(file)]

    def interpreter(self) -> tuple[str, str]:
        """Return the interpreter's path or name, and a comment on the origin."""
        if self.python is not None:
            return self.python, "--set python"
        if self.container or self.setup or not _submits_here():
            source = (
                "the image" if self.container else "the setup lines" if self.setup else "the shell that calls sbatch"
            )
            return "python", f"that of {source}; another: --set python=PATH"
        host = re.sub(r"[^\w.-]", "?", socket.gethostname())
        return sys.executable, f"the one on {host} that wrote this script; another: --set python=PATH"

    def _directives(self, submission: Submission) -> list[str]:
        per_node = submission.ranks_per_node
        wants_gpus = submission.uses_gpus and not any(option in self.sbatch for option in _GPU_OPTIONS)
        # % begins a pattern of sbatch, even in a folder's name.
        log = str(self.logs / "NAME").replace("%", "%%").removesuffix("NAME") + "%x-%j.log"
        options = {
            "job-name": submission.name,
            "nodes": submission.nodes,
            "ntasks-per-node": per_node,
            # Consecutive ranks share a node, so the layout's innermost axes communicate within a node.
            "distribution": "block",
            "cpus-per-task": self.cores(submission),
            "gpus-per-node": per_node if wants_gpus else None,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "signal": f"USR1@{self.grace}",
            "requeue": "",
            "open-mode": "append",
            "output": log,
        }
        for key, value in self.sbatch.items():
            if key in _SETTLED:
                raise ConfigError.of(f"sbatch.{key}", value, f"is not yours: {_SETTLED[key]} decides it")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
                raise ConfigError.of(f"sbatch.{key}", value, "is no long option of sbatch", "sbatch.qos=high")
            options[key] = value
        return [
            f"#SBATCH --{key}" + (f"={directive_word(str(value))}" if value != "" else "")
            for key, value in options.items()
            if value is not None
        ]

    def _ranks(self, submission: Submission, run: Path, python: str) -> tuple[list[str], list[str]]:
        """Return further options of srun, and a rank's command, inside the container if there is one."""
        words = submission.train_words(python, run)
        options = [] if self.mpi is None else [f"--mpi={self.mpi}"]
        if self.container is None:
            # A setting without an effect is refused.
            for idle in sorted({"mounts", "runtime"} & self.model_fields_set):
                raise ConfigError.of(idle, shown(getattr(self, idle)), "has no effect without a container")
            return options, words
        # Mounted under the same path as outside, so that the run's folder and file are found inside and outside.
        home = str(run.parent)
        if not run.is_absolute() or set(home) & set(",:"):
            rule = "is no folder that can be mounted in a container: a full path without , and :"
            raise ConfigError.of("--out", submission.out, rule, f"/shared/{submission.name}")
        # On a machine of the cluster the run file's folder is mounted too, for instance for data next to the file.
        beside = [str(submission.run.absolute().parent)] if _submits_here() else []
        folders = dict.fromkeys([home, *beside, *self.mounts])
        mounts = ",".join(folder if ":" in folder else f"{folder}:{folder}" for folder in folders)
        if self.runtime == "pyxis":
            return [*options, f"--container-image={self.container}", f"--container-mounts={mounts}"], words
        gpus = ["--nv"] if submission.uses_gpus else []
        return options, ["apptainer", "exec", *gpus, "--bind", mounts, self.container, *words]


def _submits_here() -> bool:
    """Return whether this is a machine of the cluster, with folders and an interpreter that the nodes see."""
    return shutil.which("sbatch") is not None
