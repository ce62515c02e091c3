"""Ranks as threads of this process, one running at a time (ranks/thread_world.py).

Functions need no importable name and results no JSON, so a notebook's function can be run. A breakpoint in one rank
stops the others. All ranks share the process: none can be killed alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch.failure import Interrupted, Report
from meshwright.ranks.launch.session import temporary_folder
from meshwright.ranks.launch.signals import FileStop, KillWorkers, StopRequest, StopSignals

if TYPE_CHECKING:
    from meshwright.ranks.thread_world import ThreadWorld

_LOOK_SECONDS = 0.2
"""Seconds between two wake-ups of the starting thread: Python runs signal handlers at a wake-up."""


def run_threads(
    work: Callable[[Environment, ThreadWorld], Any], num_ranks: int, threads: int, device: str = "cpu"
) -> list[Any]:
    """Call work(environment, world) in one thread per rank; return the results in rank order.

    An exception in the caller's wait (Ctrl-C) ends ranks when they next wait for each other.

    Args:
        work: the function that every rank calls.
        num_ranks: number of ranks.
        threads: torch's CPU threads of each rank.
        device: device of all ranks; cuda is the process's current GPU.

    Raises:
        LaunchError: the first rank that raised an exception, and from that exception.
    """
    import torch

    from meshwright.ranks.thread_world import ThreadWorld

    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    world = ThreadWorld(num_ranks, where)
    results: list[Any] = [None] * num_ranks
    before = torch.get_num_threads()

    def live(rank: int) -> None:
        torch.set_num_threads(threads)
        try:
            # GPU backward passes run in the rank's own thread. torch has one thread for all passes of a GPU: a rank
            # that waited in that thread would block the awaited rank's pass.
            with world.turn(rank), torch.autograd.set_multithreading_enabled(device == "cpu"):
                results[rank] = work(Environment(rank, num_ranks, rank, num_ranks, 0, "none", launched=True), world)
        except BaseException:  # `world` keeps the exception for the starting thread
            return

    ranks = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)]
    for thread in ranks:
        thread.start()
    try:
        for thread in ranks:
            # Short joins, since a signal handler runs only when this thread wakes.
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
    except BaseException as error:
        world.stop(error)
        raise
    finally:
        torch.set_num_threads(before)
    if world.failure is None:
        return results
    rank, failure = world.failure
    if rank < 0:
        raise failure
    raise LaunchError(str(Report.of(rank, failure))) from failure


def launch_threads(
    work: Callable[[Environment, ThreadWorld, StopRequest], Any], num_ranks: int, threads: int, device: str = "cpu"
) -> list[Any]:
    """Call `run_threads` for a job that the launcher's signals can stop. Outside the main thread no signal can.

    Raises Interrupted after a stop by a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return run_threads(
            lambda environment, world: work(environment, world, StopRequest()), num_ranks, threads, device
        )
    with temporary_folder() as folder, StopSignals(folder) as signals:
        stopping = partial(FileStop, folder, 0)
        try:
            results = run_threads(
                lambda environment, world: work(environment, world, stopping()), num_ranks, threads, device
            )
        except KillWorkers:
            assert signals.received is not None
            raise Interrupted(f"stopped by {signals.received.name}", signals.received) from None
    if signals.received is not None:
        raise Interrupted(f"stopped by {signals.received.name}", signals.received, saved=True)
    return results
