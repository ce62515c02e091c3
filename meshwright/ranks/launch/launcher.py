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
    """Start a job's ranks and wait for them; return the ranks' results, in rank order.

    A job that loses a process of any kind (failure.py has the table) is started again up to `restarts` times: after a
    rank as `fewer(ranks left)` returns, or unchanged if that is None, as by default. So is a job that ends with an
    unforeseen exception, unless the same came before. Other errors are the run's own and end it at once. Call from the
    main thread: it handles signals. Raises LaunchError with the first cause and its rank, and Interrupted when somebody
    asked the job to stop, after the workers have left by themselves or were killed.
    """
    start = Start(job, num_ranks, threads)
    job.resolve()  # a wrong name fails here, once, and not in every worker
    allow_open_files(num_ranks)
    with open_session() as session, closing(OutputServer(session.folder / SOCKET)) as output:
        status = Path(job.status or session.folder)
        clear_records(status)
        if TRANSPORTS[transport].by_mpiexec:  # imported here: neither launcher needs the other's libraries
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
                    # Ranks that gave up waiting end with their own exit code; their records say what they waited for.
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
