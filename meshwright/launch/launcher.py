"""Start a job's ranks on this machine, wait for them, and turn every way of ending into one outcome."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from meshwright.errors import LaunchError
from meshwright.launch.failure import Interrupted
from meshwright.launch.job import Job
from meshwright.launch.signals import KillWorkers, StopSignals
from meshwright.launch.stop import STOP_FILE

Transport = Literal["torch", "mpi"]


def launch(
    job: Job,
    num_ranks: int,
    transport: Transport,
    *,
    restarts: int = 0,
    threads: int,
) -> None:
    """Run `job` on `num_ranks` local ranks with `threads` CPU threads each; return when all of them have succeeded.

    A job that loses a rank is started again up to `restarts` times. Call from the main thread: it handles signals.
    Raises LaunchError with the first cause and its rank, and Interrupted when the user asked the job to stop, after
    the workers have left by themselves or were killed.
    """
    job.resolve()  # a wrong name fails here, once, and not in every worker
    with TemporaryDirectory(prefix="meshwright-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job.write(folder)
        with StopSignals(folder / STOP_FILE) as signals:
            try:
                failure = _run(folder, num_ranks, transport, restarts, threads)
            except KillWorkers:
                assert signals.received is not None
                text = f"stopped by {signals.received.name}: the workers were killed before their step was done"
                raise Interrupted(text, signals.received) from None
    if signals.received is not None:
        text = f"stopped by {signals.received.name}"
        raise Interrupted(text if failure is None else f"{text}; while stopping, {failure}", signals.received)
    if failure is not None:
        raise LaunchError(failure + _after(restarts))


def _run(folder: Path, num_ranks: int, transport: Transport, restarts: int, threads: int) -> str | None:
    """The message on why the job failed, None where it succeeded."""
    if transport == "mpi":
        from meshwright.launch.mpiexec import run_mpi

        return run_mpi(folder, num_ranks, restarts, threads)
    from meshwright.launch.elastic import run_elastic

    return run_elastic(folder, num_ranks, restarts, threads)


def _after(restarts: int) -> str:
    if restarts == 0:
        return ""
    return f"\n(the job had been restarted {restarts} time{'s' if restarts > 1 else ''})"
