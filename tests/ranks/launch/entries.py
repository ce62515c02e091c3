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
    """Leave who and where we are."""
    facts = f"{environment.rank}/{environment.world_size} {environment.local_rank} {environment.launcher}{text}"
    Path(out, f"{environment.attempt}-{environment.rank}").write_text(facts)


def greet(environment: Environment, stop: StopRequest) -> None:
    """Write to both streams."""
    print(f"out {environment.rank} tty {sys.stdout.isatty()}")
    print(f"err {environment.rank}", file=sys.stderr)


def count_threads(environment: Environment, stop: StopRequest, out: str) -> None:
    """Leave torch's number of threads."""
    import torch

    Path(out, str(environment.rank)).write_text(str(torch.get_num_threads()))


def use_threads(environment: Environment, stop: StopRequest) -> None:
    """A parallel operation."""
    import torch

    torch.ones(2**20).exp_()


def wait_for_peers(environment: Environment, out: str) -> None:
    """Return when every rank is here, each having left its process id."""
    partial = Path(out, f"partial-{environment.rank}")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(out, f"pid-{environment.rank}"))
    while len(list(Path(out).glob("pid-*"))) < environment.world_size:
        time.sleep(0.01)


def wait(environment: Environment, stop: StopRequest, out: str) -> None:
    """Take steps until asked to stop, then take a moment for a checkpoint."""
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
    """Never get as far as a first step: in a call that returns to Python when it is done."""
    wait_for_peers(environment, out)
    threading.Event().wait()


def fail(environment: Environment, stop: StopRequest, out: str, how: str) -> None:
    """Rank 1 fails; the others wait for it in vain."""
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
    """An unforeseen exception in every attempt: at the `same` place, or each time at `another`."""
    note(environment, stop, out)
    raise ValueError(f"in step {environment.attempt if place == 'another' else 7}")


def refuse(environment: Environment, stop: StopRequest) -> None:
    """A user's mistake on every rank."""
    raise DataError("corpus.bin is damaged: build it again")


def fail_in_a_row(environment: Environment, stop: StopRequest, out: str, first: str) -> None:
    """Rank 1 dies, then rank 0 breaks on it, as on a lost connection; rank 0's end may be seen first."""
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
    """The last rank of attempt 0 is killed; attempt 1 succeeds."""
    if environment.attempt == 0:
        if environment.rank == environment.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_SECONDS)
    note(environment, stop, out)


def reduce_after_restart(environment: Environment, stop: StopRequest, out: str) -> None:
    """A gloo all-reduce in each attempt, over the launcher's store; rank 1 is killed after the first."""
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
    """Rank 0 kills what started it."""
    wait_for_peers(environment, out)
    if environment.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(PATIENCE_SECONDS)


def abort(environment: Environment, stop: StopRequest) -> None:
    """MPI's own way out."""
    from mpi4py import MPI

    if environment.rank == 1:
        MPI.COMM_WORLD.Abort(7)
    MPI.COMM_WORLD.Barrier()


def lose_store(environment: Environment, stop: StopRequest, out: str) -> None:
    """Rank 0 kills the process that holds the store, the fork server's first child; no rank would end by itself."""
    if environment.rank == 0 and environment.attempt == 0:
        min(psutil.Process(os.getppid()).children(), key=lambda child: child.pid).kill()
    while environment.attempt == 0:
        time.sleep(0.1)
    Path(out, str(environment.rank)).touch()


def lose(environment: Environment, stop: StopRequest, out: str, who: str, times: int) -> None:
    """In each of the first `times` attempts rank 0 kills a process of the job; no rank would end by itself."""
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
    """Take steps until the test says that it is enough."""
    Path(out, f"begun-{environment.attempt}-{environment.rank}").touch()
    end = time.monotonic() + PATIENCE_SECONDS
    while not Path(out, "enough").exists() and time.monotonic() < end:
        time.sleep(0.01)
    note(environment, stop, out)
