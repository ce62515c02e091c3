"""A process that dies is named and replaced: ranks, store, fork server, mpiexec, by itself or at random moments.

The launcher is another process with another fork server than the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch import Job, launch
from meshwright.ranks.transports import TransportName
from tests.patience import PATIENCE_SECONDS
from tests.ranks.launch.conftest import needs_mpi

HERE = "tests.ranks.launch.entries"
KINDS: dict[str, tuple[TransportName, str]] = {
    "rank": ("torch", "rank 1 was killed by signal 9 (SIGKILL) on "),
    "store": ("torch", "the process that holds the ranks' store was killed by signal 9 (SIGKILL) on "),
    "server": ("torch", "the fork server that starts the ranks was killed by signal 9 (SIGKILL) on "),
    "rank of mpi": ("mpi", "rank 1 was killed by signal 9 (SIGKILL) on "),
    "mpiexec": ("mpi", "mpiexec was killed by signal 9 (SIGKILL) on "),
}
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[needs_mpi] if KINDS[kind][0] == "mpi" else []) for kind in KINDS]
)


def launch_and_tell(
    out: Path, transport: TransportName, restarts: int, entry: str, arguments: dict[str, object]
) -> None:
    """Write the outcome to `outcome`, and to `fewer` a line for each lost rank."""

    def fewer(most: int) -> None:
        with (out / "fewer").open("a") as stream:
            stream.write(f"{most}\n")

    text = "success"
    try:
        job = Job(f"{HERE}:{entry}", {"out": str(out), **arguments})
        launch(job, 2, transport, threads=1, restarts=restarts, fewer=fewer)
    except LaunchError as error:
        text = str(error)
    (out / "outcome").write_text(text)


@contextmanager
def launched(
    out: Path, transport: TransportName, restarts: int, entry: str, **arguments: object
) -> Iterator[BaseProcess]:
    words = (out, transport, restarts, entry, arguments)
    launcher = multiprocessing.get_context("spawn").Process(target=launch_and_tell, args=words)
    launcher.start()
    try:
        yield launcher
        launcher.join(PATIENCE_SECONDS)
        assert launcher.exitcode == 0
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(launcher.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        launcher.kill()
        launcher.join()


def attempts(out: Path) -> int:
    return len({path.name.split("-")[1] for path in out.glob("begun-*")})


@each_kind
def test_a_kind_that_dies_again_and_again_is_replaced_until_restarts_run_out(tmp_path: Path, kind: str) -> None:
    transport, message = KINDS[kind]
    with launched(tmp_path, transport, 1, "lose", who=kind.partition(" ")[0], times=2):
        pass
    said = (tmp_path / "outcome").read_text()
    assert said.startswith(message)
    assert said.endswith("(the job had been restarted 1 time)")
    assert attempts(tmp_path) == 2
    left = [int(path.read_text()) for path in tmp_path.glob("begun-*")]
    assert not psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], PATIENCE_SECONDS)[1]
    # After the loss of a rank, `shrink` may go on with fewer ranks; no other process is a rank.
    assert (tmp_path / "fewer").exists() == kind.startswith("rank")


def victims(launcher: BaseProcess, kind: str) -> list[psutil.Process]:
    """Return the living processes of a kind, of this attempt or of an attempt that is ending."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher.pid).children():
            words = " ".join(child.cmdline())
            mpi = KINDS[kind][0] == "mpi"
            if ("--oversubscribe" if mpi else "multiprocessing.forkserver") not in words:
                continue
            below = sorted(child.children(), key=lambda process: process.pid)
            store = [] if mpi else below[:1]
            if kind in ("server", "mpiexec"):
                found.append(child)
            else:
                found += store if kind == "store" else [process for process in below if process not in store]
    return found


def wait_for(condition: Callable[[], bool], launcher: BaseProcess) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert launcher.is_alive()
        assert time.monotonic() < end
        time.sleep(0.002)


@each_kind
def test_kills_at_random_moments_and_before_the_first_step(tmp_path: Path, kind: str) -> None:
    choose, killed, before = random.Random(kind), list[psutil.Process](), 0
    with launched(tmp_path, KINDS[kind][0], 60, "last") as launcher:
        while len(killed) < 4:
            if len(killed) % 2:  # in the middle of an attempt's steps, else as soon as a victim is there
                wait_for(lambda: attempts(tmp_path) > before, launcher)  # noqa: B023
            wait_for(lambda: any(victim not in killed for victim in victims(launcher, kind)), launcher)
            time.sleep(choose.uniform(0, 0.2))  # the moment, not a wait for anything
            for victim in [victim for victim in victims(launcher, kind) if victim not in killed][:1]:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                    killed.append(victim)
                before = attempts(tmp_path)
        (tmp_path / "enough").touch()
    assert (tmp_path / "outcome").read_text() == "success"


@pytest.mark.parametrize("there", [False, True])
def test_a_rank_whose_mpiexec_died_before_it_was_tied_ends_at_once(tmp_path: Path, there: bool) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    if there:
        (tmp_path / "mpiexec-0.pid").write_text(str(ended.pid))
    variables = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
    variables |= {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    rank = subprocess.run(
        [sys.executable, "-m", "meshwright.ranks.launch", str(tmp_path)], env=os.environ | variables,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert rank.returncode == -signal.SIGKILL
