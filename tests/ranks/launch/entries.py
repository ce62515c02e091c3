"""The functions that the launched jobs of these tests run. Each rank leaves files in `out`, for the test to read."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import DataError
from meshwright.ranks.launch import StopRequest
from tests.patience import PATIENCE_SECONDS


def note(environment: Environment, stop: StopRequest, out: str, text: str = "") -> None:
    """Write the rank, the numbers of ranks and the launcher."""
    facts = f"{environment.rank}/{environment.world_size} {environment.local_rank} {environment.launcher}{text}"
    Path(out, f"{environment.attempt}-{environment.rank}").write_text(facts)


def greet(environment: Environment, stop: StopRequest) -> None:
    """Write to both streams."""
    print(f"out {environment.rank} tty {sys.stdout.isatty()}")
    print(f"err {environment.rank}", file=sys.stderr)


def count_threads(environment: Environment, stop: StopRequest, out: str) -> None:
    """Write torch's number of threads."""
    import torch

    Path(out, str(environment.rank)).write_text(str(torch.get_num_threads()))


def use_threads(environment: Environment, stop: StopRequest) -> None:
    """Run a parallel operation."""
    import torch

    torch.ones(2**20).exp_()


def wait_for_peers(environment: Environment, out: str) -> None:
    """Write this rank's process id; return when every rank has written one."""
    partial = Path(out, f"partial-{environment.rank}")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(out, f"pid-{environment.rank}"))
    while len(list(Path(out).glob("pid-*"))) < environment.world_size:
        time.sleep(0.01)


def wait(environment: Environment, stop: StopRequest, out: str) -> None:
    """Take steps until asked to stop, then spend a moment as for a checkpoint."""
    assert not stop.requested
    wait_for_peers(environment, out)
    end = time.monotonic() + PATIENCE_SECONDS
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)
    Path(out, f"saved-{environment.rank}").write_text(str(stop.requested))


def wait_deaf(environment: Environment, stop: StopRequest, out: str) -> None:
    """Take one step and never end the second."""
    assert not stop.requested
    wait_for_peers(environment, out)
    time.sleep(PATIENCE_SECONDS)


def prepare(environment: Environment, stop: StopRequest, out: str) -> None:
    """Never reach a first step: wait in a call that returns to Python only at the end."""
    wait_for_peers(environment, out)
    threading.Event().wait()


def fail(environment: Environment, stop: StopRequest, out: str, how: str) -> None:
    """Fail on rank 1; the other ranks wait in vain."""
    wait_for_peers(environment, out)
    if environment.rank != 1:
        time.sleep(PATIENCE_SECONDS)
    if how == "bug":
        raise ValueError("a bug\nof two lines")
    if how == "user":
        raise DataError("corpus.bin is damaged: build it again")
    if how == "exit":
        os._exit(3)
    if how == "words":
        os.write(2, b"first\n" * 30 + b"the reason\n")
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_each_time(environment: Environment, stop: StopRequest, out: str, place: str) -> None:
    """Raise an unforeseen exception in every attempt: at the `same` place, or each time at `another`."""
    note(environment, stop, out)
    raise ValueError(f"in step {environment.attempt if place == 'another' else 7}")


def refuse(environment: Environment, stop: StopRequest) -> None:
    """Raise a user's mistake on every rank."""
    raise DataError("corpus.bin is damaged: build it again")


def fail_in_a_row(environment: Environment, stop: StopRequest, out: str, first: str) -> None:
    """Kill rank 1, then raise on rank 0 as after a lost connection; rank 0's end may be seen first."""
    wait_for_peers(environment, out)
    if environment.rank == 1:
        Path(out, "dying").touch()
        if first == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the first cause")
    while not Path(out, "dying").exists():
        time.sleep(0.001)
    time.sleep(0.02)
    raise ConnectionResetError("connection reset by peer")


def fail_once(environment: Environment, stop: StopRequest, out: str) -> None:
    """Kill the last rank in attempt 0; attempt 1 succeeds."""
    if environment.attempt == 0:
        if environment.rank == environment.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_SECONDS)
    note(environment, stop, out)


def reduce_after_restart(environment: Environment, stop: StopRequest, out: str) -> None:
    """Run a gloo all-reduce in each attempt, over the launcher's store; kill rank 1 after the first."""
    import torch
    import torch.distributed as dist

    from meshwright.ranks.environment import rendezvous

    place = rendezvous()
    store = dist.TCPStore(place.address, place.port, environment.world_size, environment.rank == 0 and not place.hosted)
    prefixed = dist.PrefixStore(f"attempt-{environment.attempt}", store)
    dist.init_process_group("gloo", store=prefixed, rank=environment.rank, world_size=environment.world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    if environment.attempt == 0 and environment.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    note(environment, stop, out, f" {int(total.item())}")
    dist.destroy_process_group()


def kill_mpiexec(environment: Environment, stop: StopRequest, out: str) -> None:
    """Kill rank 0's parent process."""
    wait_for_peers(environment, out)
    if environment.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(PATIENCE_SECONDS)


def abort(environment: Environment, stop: StopRequest) -> None:
    """Call MPI's Abort on rank 1."""
    from mpi4py import MPI

    if environment.rank == 1:
        MPI.COMM_WORLD.Abort(7)
    MPI.COMM_WORLD.Barrier()


def lose_store(environment: Environment, stop: StopRequest, out: str) -> None:
    """Kill, from rank 0, the store's process, the fork server's first child; no rank would end by itself."""
    if environment.rank == 0 and environment.attempt == 0:
        min(psutil.Process(os.getppid()).children(), key=lambda child: child.pid).kill()
    while environment.attempt == 0:
        time.sleep(0.1)
    Path(out, str(environment.rank)).touch()


def lose(environment: Environment, stop: StopRequest, out: str, who: str, times: int) -> None:
    """Kill, from rank 0, a process of the job in each of the first `times` attempts; no rank would end by itself."""
    Path(out, f"begun-{environment.attempt}-{environment.rank}").write_text(str(os.getpid()))
    if environment.attempt < times:
        if environment.rank == 0:
            parent, other = psutil.Process(os.getppid()), Path(out, f"begun-{environment.attempt}-1")
            while not (other.exists() and other.read_text()):  # rank 1 may not have been forked yet
                time.sleep(0.01)
            rank = psutil.Process(int(other.read_text()))
            store = min(parent.children(), key=lambda child: child.pid)
            victims = {"store": store, "rank": rank, "server": parent, "mpiexec": parent}
            victims[who].kill()
        time.sleep(PATIENCE_SECONDS)
    note(environment, stop, out)


def last(environment: Environment, stop: StopRequest, out: str) -> None:
    """Take steps until the test writes the file `enough`."""
    Path(out, f"begun-{environment.attempt}-{environment.rank}").touch()
    end = time.monotonic() + PATIENCE_SECONDS
    while not Path(out, "enough").exists() and time.monotonic() < end:
        time.sleep(0.01)
    note(environment, stop, out)
