"""Ctrl-C, SIGTERM, kill -9 of the launcher: soft stops, hard stops, no orphans. The launcher is another process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from meshwright.errors import LaunchError
from meshwright.launch import Interrupted, Job, joined, launch, run_worker, signals
from meshwright.launch.launcher import Transport

HERE = "tests.launch.entries"
PATIENCE_SECONDS = 30.0


def launch_and_tell(entry: str, out: Path, transport: Transport, grace_seconds: float) -> None:
    """A launcher in a process group of its own, like a shell's foreground job; leaves the outcome in `outcome`."""
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
    entry: str, out: Path, transport: Transport, grace_seconds: float = PATIENCE_SECONDS
) -> tuple[BaseProcess, list[psutil.Process]]:
    """A launcher whose two workers run, and all processes below it."""
    context = multiprocessing.get_context("spawn")
    launcher = context.Process(target=launch_and_tell, args=(entry, out, transport, grace_seconds))
    launcher.start()
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
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def test_control_c_lets_the_workers_finish(tmp_path: Path, transport: Transport) -> None:
    launcher, below = start("wait", tmp_path, transport)
    os.killpg(pid(launcher), signal.SIGINT)
    join(launcher)
    assert (tmp_path / "outcome").read_text() == "130 stopped by SIGINT"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]
    assert_gone(below)


def test_sigterm_to_the_launcher_alone(tmp_path: Path) -> None:
    launcher, below = start("wait", tmp_path, "torch")
    os.kill(pid(launcher), signal.SIGTERM)
    join(launcher)
    assert (tmp_path / "outcome").read_text() == "143 stopped by SIGTERM"
    assert (tmp_path / "saved-1").exists()
    assert_gone(below)


def test_a_second_control_c_kills(tmp_path: Path, transport: Transport) -> None:
    launcher, below = start("wait_deaf", tmp_path, transport)
    for _ in range(2):
        os.killpg(pid(launcher), signal.SIGINT)
        time.sleep(0.3)
    join(launcher)
    assert (tmp_path / "outcome").read_text().startswith("130 stopped by SIGINT: the workers were killed")
    assert_gone(below)


def test_workers_that_do_not_listen_are_killed_after_the_grace(tmp_path: Path, transport: Transport) -> None:
    launcher, below = start("wait_deaf", tmp_path, transport, grace_seconds=0.2)
    os.kill(pid(launcher), signal.SIGINT)
    join(launcher)
    assert "the workers were killed" in (tmp_path / "outcome").read_text()
    assert_gone(below)


def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path, transport: Transport) -> None:
    launcher, below = start("wait_deaf", tmp_path, transport)
    os.kill(pid(launcher), signal.SIGKILL)
    join(launcher)
    assert_gone(below)


@pytest.fixture
def in_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


def start_joined(entry: str, arguments: dict[str, str]) -> BaseProcess:
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=run_worker, args=(Job(f"{HERE}:{entry}", arguments), 1))
    worker.start()
    return worker


def test_joined(in_torchrun: None) -> None:
    assert joined()


def test_not_joined() -> None:
    assert not joined()


def test_a_joined_worker_stops_softly_on_sigterm(tmp_path: Path, in_torchrun: None) -> None:
    worker = start_joined("wait", {"out": str(tmp_path)})
    wait_for((tmp_path / "pid-0").exists)
    os.kill(pid(worker), signal.SIGTERM)
    join(worker)
    assert (worker.exitcode, (tmp_path / "saved-0").read_text()) == (0, "True")


def test_a_joined_worker_that_fails_says_so_once(in_torchrun: None, capfd: pytest.CaptureFixture[str]) -> None:
    worker = start_joined("refuse", {})
    join(worker)
    assert (worker.exitcode, capfd.readouterr().err) == (1, "rank 0 failed: corpus.bin is damaged: build it again\n")
