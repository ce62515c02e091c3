"""Start a job's ranks on this machine, wait for them, and turn every ending into one outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.hang import clear_records, explain_hang, read_records
from meshwright.ranks.launch.failure import Failure, Interrupted, allow_open_files, read_results
from meshwright.ranks.launch.output import SOCKET, OutputServer
from meshwright.ranks.launch.session import open_session
from meshwright.ranks.launch.signals import STOP_FILE, KillWorkers, StopSignals, listens
from meshwright.ranks.launch.worker import Job
from meshwright.ranks.transports import TRANSPORTS, TransportName


@dataclass(frozen=True)
class Start:
    """An attempt at `job`: `num_ranks` local ranks with `threads` CPU threads each."""

    job: Job
    num_ranks: int
    threads: int


def launch(
    job: Job,
    num_ranks: int,
    transport: TransportName,
    *,
    threads: int,
    restarts: int = 0,
    fewer: Callable[[int], Start | None] = lambda most: None,
) -> list[Any]:
    """Start a job's ranks and wait for their end; return their results, in rank order.

    Call from the main thread, which receives signals. A job that loses a process (table: `Death`) is restarted at most
    `restarts` times: after the loss of a rank as `fewer(ranks left)` returns, or unchanged if that is None. So is a job
    that ends with an unforeseen exception, unless the previous attempt ended with the same one. Other errors are the
    run's own and end the job at once.

    Raises:
        LaunchError: the first cause and its rank.
        Interrupted: a signal asked the job to stop, and all workers have returned or were killed.
    """
    start = Start(job, num_ranks, threads)
    job.resolve()  # a wrong name fails here once, not in every worker
    allow_open_files(num_ranks)
    with open_session() as session, closing(OutputServer(session.folder / SOCKET)) as output:
        status = Path(job.status or session.folder)
        clear_records(status)
        if TRANSPORTS[transport].by_mpiexec:  # imported here: each launcher needs other libraries
            from meshwright.ranks.launch.mpiexec import run_mpi as run_attempt
        else:
            from meshwright.ranks.launch.forked import run_forked as run_attempt
        failure: Failure | None = None
        with StopSignals(session.folder) as signals:
            try:
                for attempt in range(restarts + 1):
                    before = failure
                    start.job.write(session.folder)
                    failure = run_attempt(session, start.num_ranks, start.threads, output.last_words, attempt)
                    # Ranks that timed out have an exit code of their own; the records name the awaited calls.
                    if failure is not None and (hang := explain_hang(read_records(status, attempt))):
                        failure = Failure(hang, lost=True, rank=True)
                    stopping = (session.folder / STOP_FILE).exists()
                    if failure is None or stopping or attempt == restarts or not failure.again(before):
                        break
                    if failure.rank:
                        start = fewer(start.num_ranks - 1) or start
            except KillWorkers:
                assert signals.received is not None
                when = "before their step was done" if listens(session.folder) else "before their first step"
                text = f"stopped by {signals.received.name}: the workers were killed {when}"
                raise Interrupted(text, signals.received) from None
        results = read_results(session.folder, attempt, start.num_ranks) if failure is None else []
    if signals.received is not None:
        text = f"stopped by {signals.received.name}"
        if failure is None:
            raise Interrupted(text, signals.received, saved=True)
        raise Interrupted(f"{text}; while stopping, {failure.text}", signals.received)
    if failure is not None:
        times = f"{attempt} time{'s' if attempt > 1 else ''}"
        raise LaunchError(failure.text + (f"\n(the job had been restarted {times})" if attempt else ""))
    return results
