"""One rank's process, which calls the job's entry function, listens to stop requests, and reports an exception.

The job is a function's name and arguments, stored in the launch folder as JSON (no pickle).
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
"""A function entry(environment, stop, **arguments). The return value is the rank's result, and must be JSON."""

_FILE = "job.json"


@dataclass(frozen=True)
class Job:
    """A function for ranks to call. `entry`: `package.module:function`. `arguments`: keyword arguments, as JSON.

    `status`: the folder of ranks' records (hang.py). None: the launch folder, which the launcher removes at the end.
    `preload`: modules imported by the ranks in addition to the entry's; forked ranks share one import in the server.
    """

    entry: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: str | None = None
    preload: Sequence[str] = ()

    def resolve(self) -> Entry:
        """Import the entry function. Raises LaunchError if the module has no such function."""
        module_name, _, name = self.entry.partition(":")
        if not module_name or not name:
            raise LaunchError(f"entry {self.entry} is not of the form package.module:function")
        try:
            entry: Entry = vars(importlib.import_module(module_name))[name]
        except (ModuleNotFoundError, KeyError) as error:
            raise LaunchError(f"entry {self.entry} does not exist: {error}") from error
        return entry

    def write(self, folder: Path) -> None:
        """Write the job into a launch folder, for the workers."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read the job that the launcher wrote into `folder`."""
        return cls(**json.loads((folder / _FILE).read_text()))


def joined() -> bool:
    """Return whether another launcher (torchrun, srun, mpirun) started this process as one rank of a job."""
    return read_environment().launcher != "none"


def run_worker(job: Job, threads: int) -> Any:
    """Run `job` in this process, which another launcher started, and return this rank's result.

    The counterpart of `launch` if `joined()`. SIGTERM, SIGINT and SIGUSR1 ask for a soft stop. The process then exits
    with STOPPED_EXIT_CODE, since Slurm would take 0 for a job that is done. Under torchrun's agent it returns instead
    and ends with 0, since the agent would restart a rank with another code.

    An exception is printed once, with the rank, and ends the process with code 1, so that the outer launcher ends the
    job. The exit does not wait for peers, as MPI's exit handler would.
    """
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()
    if has_agent():  # else a rank would train on, and occupy the node, after a kill of the agent alone
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
    """Run the job in `folder` for our own launcher, which waits for this process."""
    ignore_stop_signals()
    keep_freed_memory()
    job = Job.read(folder)
    environment = replace(read_environment(), status_folder=Path(job.status or folder), launched=True)
    try:
        result = job.resolve()(environment, FileStop(folder, environment.attempt), **job.arguments)
        # The file is read by `read_results`.
        target = attempt_folder(folder, environment.attempt) / f"result-{environment.rank}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result))
        flush(sys.stdout, sys.stderr)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        Report.of(environment.rank, error).write(folder, environment.attempt)
        flush(sys.stdout, sys.stderr)
        # The only rank of a job need not linger: no other rank's death can precede.
        if environment.world_size > 1:
            time.sleep(LINGER_SECONDS)
        os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore signals that ask a job to stop, under our own launcher.

    A terminal sends Ctrl-C and hang-up to the whole process group. Slurm, systemd and docker send SIGTERM to all
    processes of a job. The launcher turns these signals into a soft stop, and ends workers by SIGKILL.
    """
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
