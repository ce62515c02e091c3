"""The inside of one rank: calls the job's entry function, listens to stop requests, reports an exception and leaves."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from meshwright.allocator import keep_freed_memory
from meshwright.environment import read_environment
from meshwright.launch.failure import Report, leave
from meshwright.launch.job import Job
from meshwright.launch.limits import allow_open_files
from meshwright.launch.output import PatientStream, flush
from meshwright.launch.stop import STOPPED_EXIT_CODE, FileStop, SignalStop


def joined() -> bool:
    """Whether another launcher (torchrun, srun, mpirun) started this process as one rank of a job."""
    return read_environment().launcher != "none"


def run_worker(job: Job, threads: int) -> None:
    """Run `job` as this very process, which another launcher started: the counterpart of `launch` where `joined()`.

    SIGTERM, SIGINT and SIGUSR1 ask for a soft stop, after which the process exits with STOPPED_EXIT_CODE: Slurm would
    take 0 for a job that is done. Under torchrun with 0, since it would start a failed rank again. An exception is
    printed once, with its rank, and ends the process with code 1 without waiting for its peers (MPI's exit handler
    would), so that the outer launcher ends the job.
    """
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()
    environment = replace(read_environment(), status_folder=None if job.status is None else Path(job.status))
    stop = SignalStop()
    try:
        allow_open_files(environment.world_size)
        job.run(environment, stop)
        if stop.requested and environment.launcher != "torchrun":
            sys.exit(STOPPED_EXIT_CODE)
    except BaseException as error:
        if _asks_to_leave(error):
            raise
        print(Report.of(environment.rank, error), file=PatientStream(sys.stderr))
        _flush()
        leave()


def run_launched(folder: Path) -> None:
    """Run the job that our launcher left in `folder`; it waits for this process."""
    ignore_stop_signals()
    keep_freed_memory()
    job = Job.read(folder)
    environment = replace(read_environment(), status_folder=Path(job.status or folder), launched=True)
    try:
        job.run(environment, FileStop(folder, environment.attempt))
        _flush()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        Report.of(environment.rank, error).write(folder, environment.attempt)
        _flush()
        if environment.world_size == 1:
            os._exit(1)
        leave()


def ignore_stop_signals() -> None:
    """Outlive what asks a job to stop, under our own launcher.

    A terminal sends Ctrl-C and hang-up to the whole process group; Slurm, systemd and docker send SIGTERM to all
    processes of a job. The launcher turns them into a soft stop. To end us, it sends SIGKILL.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _asks_to_leave(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0, STOPPED_EXIT_CODE)


def _flush() -> None:
    flush(sys.stdout)
    flush(sys.stderr)
