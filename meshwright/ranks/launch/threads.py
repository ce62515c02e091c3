"""Ranks as threads of this process: one runs at a time (ranks/thread_world.py).

Functions need no importable name and results no JSON: a notebook's function works, and a breakpoint in one rank stops
the others. Ranks share the process: one killed rank ends all.
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
"""Seconds of the starting thread's naps: Python runs signal handlers when it wakes."""


def run_threads(
    work: Callable[[Environment, ThreadWorld], Any], num_ranks: int, threads: int, device: str = "cpu"
) -> list[Any]:
    """Call work(environment, world) in a thread for each rank, with `threads` CPU threads of torch's; what each
    returned, in rank order. `device`: of all ranks; cuda: the process's current GPU.

    Raises LaunchError for the first rank that raised, from its exception. An exception in the caller's wait (Ctrl-C)
    ends ranks at their next wait for each other.
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
            # Backward passes stay in their rank's thread: torch has one thread for all passes of a GPU, and a rank that
            # waited there for another would keep that rank's pass from starting.
            with world.turn(rank), torch.autograd.set_multithreading_enabled(device == "cpu"):
                results[rank] = work(Environment(rank, num_ranks, rank, num_ranks, 0, "none", launched=True), world)
        except BaseException:  # the world keeps the exception for the starting thread
            return

    ranks = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)]
    for thread in ranks:
        thread.start()
    try:
        for thread in ranks:
            # Short joins: a signal handler runs only when this thread wakes.
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
    """`run_threads` of a job that may be asked to stop: by the launcher's signals, in the main thread.

    Raises Interrupted if it was.
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
