"""Ctrl-C, SIGTERM, kill -9 of the launcher: soft stops, hard stops, no orphans. The launcher is another process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch import Interrupted, Job, joined, launch, run_worker, signals
from meshwright.ranks.launch.session import open_session, sweep
from meshwright.ranks.transports import TransportName
from tests.patience import PATIENCE_SECONDS

HERE = "tests.ranks.launch.entries"


_STARTED: list[BaseProcess] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """End all processes that a test has started, also if the test fails; workers end with their launcher."""
    yield
    while _STARTED:
        started = _STARTED.pop()
        for process in (*children_of(started), started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.join()


def children_of(started: BaseProcess) -> list[psutil.Process]:
    try:
        return psutil.Process(started.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def launch_and_tell(entry: str, out: Path, transport: TransportName, grace_seconds: float) -> None:
    """Launch in a new process group, like a shell's foreground job; write the outcome to `outcome`."""
    os.setpgid(0, 0)
    signals.GRACE_SECONDS = grace_seconds
    text = "success"
    try:
        launch(Job(f"{HERE}:{entry}", {"out": str(out)}), 2, transport, threads=1)
    except Interrupted as error:
        text = f"{error.exit_code} {error}"
    except LaunchError as error:
        text = str(error)
    (out / "outcome").write_text(text)


def start(
    entry: str, out: Path, transport: TransportName, grace_seconds: float = PATIENCE_SECONDS
) -> tuple[BaseProcess, list[psutil.Process]]:
    """Return a launcher with two running workers, and all processes below the launcher."""
    # A forked launcher would share the tests' fork server. mpiexec's launcher has none, and imports no torch.
    context: BaseContext = multiprocessing.get_context("fork" if transport == "mpi" else "spawn")
    launcher = context.Process(target=launch_and_tell, args=(entry, out, transport, grace_seconds))
    launcher.start()
    _STARTED.append(launcher)
    wait_for(lambda: len(list(out.glob("pid-*"))) == 2)
    below = psutil.Process(launcher.pid).children(recursive=True)
    workers = {int(path.read_text()) for path in out.glob("pid-*")}
    assert workers <= {process.pid for process in below}
    return launcher, below


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def join(launcher: BaseProcess) -> None:
    launcher.join(PATIENCE_SECONDS)
    assert launcher.exitcode is not None, "the launcher hangs"


def assert_gone(processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(map(lives, processes)))


def lives(process: psutil.Process) -> bool:
    """Return whether a process lives; a killed process that its new parent has not reaped yet counts as dead."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def test_control_c_lets_the_workers_finish(tmp_path: Path, transport: TransportName) -> None:
    launcher, below = start("wait", tmp_path, transport)
    os.killpg(pid(launcher), signal.SIGINT)
    join(launcher)
    assert (tmp_path / "outcome").read_text() == "130 stopped by SIGINT"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]
    assert_gone(below)


def test_a_second_control_c_kills(tmp_path: Path, transport: TransportName) -> None:
    launcher, below = start("wait_deaf", tmp_path, transport)
    for _ in range(2):
        os.killpg(pid(launcher), signal.SIGINT)
        time.sleep(0.3)
    join(launcher)
    assert (tmp_path / "outcome").read_text().startswith("130 stopped by SIGINT: the workers were killed")
    assert_gone(below)


def test_workers_that_do_not_listen_are_killed_after_the_grace(tmp_path: Path, transport: TransportName) -> None:
    launcher, below = start("wait_deaf", tmp_path, transport, grace_seconds=0.2)
    os.kill(pid(launcher), signal.SIGINT)
    join(launcher)
    assert "the workers were killed" in (tmp_path / "outcome").read_text()
    assert_gone(below)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a short TMPDIR with the launcher's sockets, which no other test uses."""
    with tempfile.TemporaryDirectory(prefix="mw-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        tempfile.tempdir = None  # read TMPDIR again
        yield Path(folder)
    tempfile.tempdir = None


SHARED_MEMORY = Path("/dev/shm")


def in_shared_memory() -> set[str]:
    """Return the files of Open MPI and of launchers in shared memory; launchers of other tests may run meanwhile."""
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if name.startswith(("sm_segment", "ucx", "psm", "pmix"))}


def test_a_killed_launcher_leaves_no_orphans_and_the_next_one_sweeps(
    tmp_path: Path, transport: TransportName, temporary: Path
) -> None:
    before = in_shared_memory()
    launcher, below = start("wait_deaf", tmp_path, transport)
    os.kill(pid(launcher), signal.SIGKILL)
    died = time.monotonic()
    join(launcher)
    assert_gone(below)
    assert time.monotonic() - died < 1
    left = {path.name for path in temporary.iterdir()} - {"torchinductor_root"}  # torch's cache, one a user
    assert left
    assert all(name.startswith(("meshwright-", "pymp-")) for name in left)
    sweep(temporary)
    sweep(SHARED_MEMORY)
    assert {path.name for path in temporary.iterdir()} <= {"torchinductor_root"}
    assert not in_shared_memory() - before


def test_the_sweep_leaves_what_lives(temporary: Path) -> None:
    """The sweep leaves a session in use, another program's folder with an equal name, and a session in the making."""
    for name in ("meshwright-kept", "pymp-of-another-program"):
        (temporary / name).mkdir()
    with open_session() as session:
        sweep(temporary)
        sweep(SHARED_MEMORY)
        assert session.folder.exists()
        assert session.shared.exists()
    assert {path.name for path in temporary.iterdir()} == {"meshwright-kept", "pymp-of-another-program"}
    assert not session.shared.exists()


JOINED = {
    "torchrun": {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "1",
    },
    "a pod": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    "slurm": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},
}  # fmt: skip


def join_as(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOINED[launcher].items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def in_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    join_as("torchrun", monkeypatch)


def signal_all(launcher: BaseProcess, below: list[psutil.Process], number: signal.Signals) -> None:
    """Signal as Slurm, systemd and docker do: every process of the tree is signalled, the youngest first or last."""
    for process in below:
        process.send_signal(number)
    os.kill(pid(launcher), number)


def test_sigterm_to_the_whole_tree_lets_the_workers_finish(tmp_path: Path, transport: TransportName) -> None:
    launcher, below = start("wait", tmp_path, transport)
    signal_all(launcher, below, signal.SIGTERM)
    os.kill(pid(launcher), signal.SIGTERM)  # `timeout` signals its child, then its child's group
    join(launcher)
    assert (tmp_path / "outcome").read_text() == "75 stopped by SIGTERM"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]
    assert_gone(below)


def test_sigterm_before_the_first_step_ends_the_run_at_once(tmp_path: Path, transport: TransportName) -> None:
    launcher, below = start("prepare", tmp_path, transport)
    signal_all(launcher, below, signal.SIGTERM)
    join(launcher)
    assert (
        tmp_path / "outcome"
    ).read_text() == "143 stopped by SIGTERM: the workers were killed before their first step"
    assert_gone(below)


def start_joined(entry: str, arguments: dict[str, str]) -> BaseProcess:
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=run_worker, args=(Job(f"{HERE}:{entry}", arguments), 1))
    worker.start()
    _STARTED.append(worker)
    return worker


def test_joined(in_torchrun: None) -> None:
    assert joined()


def test_not_joined() -> None:
    assert not joined()


@pytest.mark.parametrize("launcher, code", [("torchrun", 0), ("slurm", 75), ("a pod", 75)])
def test_a_joined_worker_stops_softly_on_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, code: int
) -> None:
    join_as(launcher, monkeypatch)
    worker = start_joined("wait", {"out": str(tmp_path)})
    wait_for((tmp_path / "pid-0").exists)
    for _ in range(2):  # torchrun and srun forward a signal that their workers have already received
        os.kill(pid(worker), signal.SIGTERM)
        time.sleep(0.05)
    join(worker)
    assert (worker.exitcode, (tmp_path / "saved-0").read_text()) == (code, "True")


def test_a_joined_worker_leaves_at_once_before_its_first_step(tmp_path: Path, in_torchrun: None) -> None:
    worker = start_joined("prepare", {"out": str(tmp_path)})
    wait_for((tmp_path / "pid-0").exists)
    os.kill(pid(worker), signal.SIGTERM)
    join(worker)
    assert worker.exitcode == -signal.SIGTERM


def test_a_joined_worker_leaves_at_once_when_asked_twice(tmp_path: Path, in_torchrun: None) -> None:
    worker = start_joined("wait_deaf", {"out": str(tmp_path)})
    wait_for((tmp_path / "pid-0").exists)
    os.kill(pid(worker), signal.SIGTERM)
    time.sleep(1.2)
    os.kill(pid(worker), signal.SIGTERM)
    join(worker)
    assert worker.exitcode == -signal.SIGTERM


def test_a_joined_worker_that_fails_says_so_once(in_torchrun: None, capfd: pytest.CaptureFixture[str]) -> None:
    worker = start_joined("refuse", {})
    join(worker)
    text = f"rank 0 on {socket.gethostname()} failed: corpus.bin is damaged: build it again\n"
    assert (worker.exitcode, capfd.readouterr().err) == (1, text)
