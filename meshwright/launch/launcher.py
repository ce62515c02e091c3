"""Start a job's ranks on this machine, wait for them, and turn every way of ending into one outcome."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.errors import LaunchError
from meshwright.launch.failure import Failure, Interrupted, LastWords, allow_open_files, read_results
from meshwright.launch.output import SOCKET, OutputServer
from meshwright.launch.session import Session, open_session
from meshwright.launch.signals import STOP_FILE, KillWorkers, StopSignals, listens
from meshwright.launch.worker import Job
from meshwright.ranks.hang import clear_records, explain_hang, read_records
from meshwright.ranks.section import TRANSPORTS, TransportName


def launch(
    job: Job,
    num_ranks: int,
    transport: TransportName,
    *,
    restarts: int = 0,
    threads: int,
) -> list[Any]:
    """Run `job` on `num_ranks` local ranks with `threads` CPU threads each; return the ranks' results, in rank order.

    A job that loses a rank is started again up to `restarts` times; so is one that ends with an unforeseen exception,
    unless the same came before. Other errors are the run's own and end it at once. Call from the main thread: it
    handles signals. Raises LaunchError with the first cause and its rank, and Interrupted when somebody asked the job
    to stop, after the workers have left by themselves or were killed.
    """
    job.resolve()  # a wrong name fails here, once, and not in every worker
    allow_open_files(num_ranks)
    with open_session() as session, OutputServer(session.folder / SOCKET) as output:
        status = Path(job.status or session.folder)
        clear_records(status)
        job.write(session.folder)
        with StopSignals(session.folder) as signals:
            try:
                run_attempt = partial(_starter(transport), session, num_ranks, threads, output.last_words)
                failure, attempt = _run(session, status, run_attempt, restarts)
            except KillWorkers:
                raise _killed(signals, session.folder) from None
        results = read_results(session.folder, attempt, num_ranks) if failure is None else []
    if signals.received is not None:
        text = f"stopped by {signals.received.name}"
        if failure is None:
            raise Interrupted(text, signals.received, saved=True)
        raise Interrupted(f"{text}; while stopping, {failure.text}", signals.received)
    if failure is not None:
        raise LaunchError(failure.text + _after(attempt))
    return results


def _run(
    session: Session, status: Path, run_attempt: Callable[[int], Failure | None], restarts: int
) -> tuple[Failure | None, int]:
    """Attempts until one succeeds or another would not help: why the last failed (None: it did not), and its number."""
    before: Failure | None = None
    for attempt in range(restarts + 1):
        failure = run_attempt(attempt)
        if failure is not None and (hang := explain_hang(read_records(status, attempt))):
            failure = Failure(hang, lost=True)
        stopping = (session.folder / STOP_FILE).exists()
        if failure is None or stopping or not failure.again(before):
            break
        before = failure
    return failure, attempt


def _starter(transport: TransportName) -> Callable[[Session, int, int, LastWords, int], Failure | None]:
    if TRANSPORTS[transport].by_mpiexec:
        from meshwright.launch.mpiexec import run_mpi

        return run_mpi
    from meshwright.launch.forked import run_forked

    return run_forked


def _killed(signals: StopSignals, folder: Path) -> Interrupted:
    assert signals.received is not None
    when = "before their step was done" if listens(folder) else "before their first step"
    text = f"stopped by {signals.received.name}: the workers were killed {when}"
    return Interrupted(text, signals.received)


def _after(restarts: int) -> str:
    if restarts == 0:
        return ""
    return f"\n(the job had been restarted {restarts} time{'s' if restarts > 1 else ''})"
