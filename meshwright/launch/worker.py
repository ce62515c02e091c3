"""The inside of one rank: calls the job's entry function, listens to stop requests, reports an exception and leaves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from meshwright.allocator import keep_freed_memory
from meshwright.environment import read_environment
from meshwright.launch.failure import Report, leave
from meshwright.launch.job import Job
from meshwright.launch.stop import STOP_FILE, StopRequest


def joined() -> bool:
    """Whether another launcher (torchrun, srun, mpirun) started this process as one rank of a job."""
    return read_environment().launcher != "none"


def run_worker(job: Job, threads: int) -> None:
    """Run `job` as this very process, which another launcher started: the counterpart of `launch` where `joined()`.

    SIGTERM, SIGINT and SIGUSR1 ask for a soft stop. An exception is printed once, with its rank, and ends the process
    with code 1 without waiting for its peers (MPI's exit handler would), so that the outer launcher ends the job.
    """
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()
    environment = read_environment()
    stop = StopRequest()
    stop.listen()
    try:
        job.run(environment, stop)
    except BaseException as error:
        if _asks_for_success(error):
            return
        print(Report.of(environment.rank, error), file=sys.stderr)
        _flush()
        leave()


def run_launched(folder: Path) -> None:
    """Run the job that our launcher left in `folder`; it waits for this process."""
    # A terminal sends Ctrl-C and hang-up to the whole process group; the launcher turns them into a soft stop. SIGTERM
    # is what the launcher sends when another rank has died: no time to lose.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    environment = read_environment()
    try:
        Job.read(folder).run(environment, StopRequest(folder / STOP_FILE))
        _flush()
    except BaseException as error:
        if _asks_for_success(error):
            return
        Report.of(environment.rank, error).write(folder, environment.attempt)
        _flush()
        if environment.world_size == 1:
            os._exit(1)
        leave()


def _asks_for_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
