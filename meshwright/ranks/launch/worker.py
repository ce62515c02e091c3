"""One rank's process: calls the job's entry function, listens to stop requests, reports an exception, and exits.

The job is a function's name and arguments, in the launch folder as JSON (no pickle).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.ranks.environment import has_agent, read_environment
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch.failure import LINGER_SECONDS, Report, allow_open_files
from meshwright.ranks.launch.signals import STOPPED_EXIT_CODE, FileStop, SignalStop, attempt_folder
from meshwright.ranks.launch.tether import die_with_parent
from meshwright.ranks.machine import keep_freed_memory
from meshwright.ranks.streams import flush, say

Entry = Callable[..., object]
"""Called as entry(environment, stop, **arguments); its return value is the rank's result, and must be JSON."""

_FILE = "job.json"


@dataclass(frozen=True)
class Job:
    """`entry`: `package.module:function`; `arguments`: its keyword arguments, as JSON.

    `status`: the folder of ranks' records (hang.py). None: the launch folder, which is removed with the launcher.
    `preload`: modules that the ranks will import, beside the entry's: once for all where they are forked.
    """

    entry: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: str | None = None
    preload: Sequence[str] = ()

    def resolve(self) -> Entry:
        """Import the entry function. Raises LaunchError if there is none of that name."""
        module_name, _, name = self.entry.partition(":")
        if not module_name or not name:
            raise LaunchError(f"entry {self.entry} is not of the form package.module:function")
        try:
            entry: Entry = vars(importlib.import_module(module_name))[name]
        except (ModuleNotFoundError, KeyError) as error:
            raise LaunchError(f"entry {self.entry} does not exist: {error}") from error
        return entry

    def write(self, folder: Path) -> None:
        """Write the job into a launch folder, for its workers."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """The job that the launcher left in `folder`."""
        return cls(**json.loads((folder / _FILE).read_text()))


def joined() -> bool:
    """Whether another launcher (torchrun, srun, mpirun) started this process as one rank of a job."""
    return read_environment().launcher != "none"


def run_worker(job: Job, threads: int) -> Any:
    """Run `job` as this very process, which another launcher started: the counterpart of `launch` where `joined()`.

    Returns this rank's result.

    SIGTERM, SIGINT and SIGUSR1 ask for a soft stop, after which the process exits with STOPPED_EXIT_CODE: Slurm would
    take 0 for a job that is done. Under torchrun's agent with 0, since that would start a failed rank again. An
    exception is printed once, with its rank, and ends the process with code 1 without waiting for its peers (MPI's
    exit handler would), so that the outer launcher ends the job.
    """
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()
    if has_agent():  # else a rank whose agent alone was killed would train on, and occupy its node
        die_with_parent(None)
    environment = replace(read_environment(), status_folder=None if job.status is None else Path(job.status))
    stop = SignalStop()
    try:
        allow_open_files(environment.world_size)
        result = job.resolve()(environment, stop, **job.arguments)
        if stop.requested and not has_agent():
            sys.exit(STOPPED_EXIT_CODE)
        return result
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0, STOPPED_EXIT_CODE):
            raise  # no failure: the rank was asked to leave
        report = replace(Report.of(environment.rank, error), host=socket.gethostname())
        say(report, file=sys.stderr)
        flush(sys.stdout, sys.stderr)
        time.sleep(LINGER_SECONDS)
        os._exit(1)  # without exit handlers, which may wait for peers


def run_launched(folder: Path) -> None:
    """Run the job in `folder`, for our launcher, which waits for this process."""
    ignore_stop_signals()
    keep_freed_memory()
    job = Job.read(folder)
    environment = replace(read_environment(), status_folder=Path(job.status or folder), launched=True)
    try:
        result = job.resolve()(environment, FileStop(folder, environment.attempt), **job.arguments)
        # As `read_results` reads it.
        target = attempt_folder(folder, environment.attempt) / f"result-{environment.rank}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result))
        flush(sys.stdout, sys.stderr)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        Report.of(environment.rank, error).write(folder, environment.attempt)
        flush(sys.stdout, sys.stderr)
        # A lone rank need not linger: no other rank's death should be seen first.
        if environment.world_size > 1:
            time.sleep(LINGER_SECONDS)
        os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore signals that ask a job to stop, under our own launcher.

    A terminal sends Ctrl-C and hang-up to the whole process group; Slurm, systemd and docker send SIGTERM to all
    processes of a job. The launcher turns them into a soft stop, and ends workers by SIGKILL.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
