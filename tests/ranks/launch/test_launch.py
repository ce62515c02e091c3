"""Real processes: success, every kind of death, restarts. Signals and orphans: test_signals.py."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import psutil
import pytest
import torch

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch import Job, launch
from meshwright.ranks.launch.session import make_fork_server_folder, sweep
from meshwright.ranks.transports import TransportName
from tests.patience import PATIENCE_SECONDS
from tests.ranks.launch.conftest import needs_mpi

HERE = "tests.ranks.launch.entries"


def read(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in out.iterdir()}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_runs_once(tmp_path: Path, transport: TransportName, num_ranks: int) -> None:
    launch(Job(f"{HERE}:note", {"out": str(tmp_path)}), num_ranks, transport, threads=1)
    name = "torchrun" if transport == "torch" else "mpi"
    assert read(tmp_path) == {f"0-{rank}": f"{rank}/{num_ranks} {rank} {name}" for rank in range(num_ranks)}


def test_workers_write_to_the_launchers_streams(capfd: pytest.CaptureFixture[str], transport: TransportName) -> None:
    launch(Job(f"{HERE}:greet"), 2, transport, threads=1)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["out 0 tty False", "out 1 tty False"]
    assert sorted(err.splitlines()) == ["err 0", "err 1"]


def test_threads(tmp_path: Path, transport: TransportName) -> None:
    launch(Job(f"{HERE}:count_threads", {"out": str(tmp_path)}), 1, transport, threads=2)
    assert read(tmp_path) == {"0": "2"}


@pytest.mark.parametrize(
    "how, message",
    [
        ("bug", "rank 1 failed: ValueError: a bug\nTraceback"),
        ("user", "rank 1 failed: corpus.bin is damaged: build it again"),
        ("exit", "rank 1 exited with code 3 and left no message"),
        ("kill", "rank 1 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_dying_rank_ends_the_job_with_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], transport: TransportName, how: str, message: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(Job(f"{HERE}:fail", {"out": str(tmp_path), "how": how}), 2, transport, threads=1)
    assert str(caught.value).startswith(message)
    assert ("Traceback" in str(caught.value)) == (how == "bug")
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_ends_without_a_report_has_said_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], transport: TransportName
) -> None:
    """The message has the last lines of the rank's standard error; the launcher's standard error has all lines."""
    with pytest.raises(LaunchError) as caught:
        launch(Job(f"{HERE}:fail", {"out": str(tmp_path), "how": "words"}), 2, transport, threads=1)
    first, *rest = str(caught.value).splitlines()
    host = socket.gethostname()
    assert first == f"rank 1 exited with code 3 and left no message, on {host}; the end of its standard error:"
    assert rest == ["first"] * 19 + ["the reason"]
    assert capfd.readouterr() == ("", "first\n" * 30 + "the reason\n")


GUARDLESS = """
import sys
from meshwright.ranks.launch import run

def step(rank):
    return rank.mesh.rank

print("imported", file=sys.stderr)
if {condition}:
    print("returned", run({function}, 2))
"""


def ran(script: Path, condition: str, function: str) -> subprocess.CompletedProcess[str]:
    script.write_text(GUARDLESS.format(condition=condition, function=function))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_a_script_without_a_main_guard_is_told_what_it_lacks(tmp_path: Path) -> None:
    """Ranks import the script, and the script starts ranks again, so a rank dies before any line of Meshwright."""
    error = ran(tmp_path / "script.py", "True", '"builtins:repr"').stderr.rpartition("LaunchError: rank ")[2]
    assert "exited with code 1 and left no message, on " in error
    assert "; the end of its standard error:\n" in error
    assert "if __name__ == '__main__':" in error
    own = ran(tmp_path / "script.py", "True", "step").stderr
    assert "starts ranks while it is imported, as every rank imports it: put what starts ranks under `if __na" in own


def test_what_a_script_says_while_ranks_import_it_is_heard(tmp_path: Path) -> None:
    done = ran(tmp_path / "script.py", '__name__ == "__main__"', "step")
    assert done.stdout == "returned [0, 1]\n"
    assert done.stderr.count("imported") >= 3, "here, and on each rank"


@pytest.mark.parametrize(
    "first, message", [("killed", "rank 1 was killed by signal 9"), ("raised", "rank 1 failed: ValueError: the first")]
)
def test_the_first_cause_is_named_not_its_consequence(
    tmp_path: Path, transport: TransportName, first: str, message: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(Job(f"{HERE}:fail_in_a_row", {"out": str(tmp_path), "first": first}), 2, transport, threads=1)
    assert str(caught.value).startswith(message)


def test_a_lost_rank_restarts_the_job(tmp_path: Path, transport: TransportName) -> None:
    launch(Job(f"{HERE}:fail_once", {"out": str(tmp_path)}), 2, transport, restarts=1, threads=1)
    assert sorted(read(tmp_path)) == ["1-0", "1-1"]


def test_a_process_group_restarts_over_the_launchers_store(tmp_path: Path) -> None:
    launch(Job(f"{HERE}:reduce_after_restart", {"out": str(tmp_path)}), 2, "torch", restarts=2, threads=1)
    assert read(tmp_path) == {"1-0": "0/2 0 torchrun 2", "1-1": "1/2 1 torchrun 2"}


def test_a_lost_store_ends_the_job_at_once_and_another_attempt_has_its_own(tmp_path: Path) -> None:
    job = Job(f"{HERE}:lose_store", {"out": str(tmp_path)})
    with pytest.raises(LaunchError) as caught:
        launch(job, 2, "torch", threads=1)
    killed = "the process that holds the ranks' store was killed by signal 9 (SIGKILL)"
    assert str(caught.value) == f"{killed} on {socket.gethostname()}"
    launch(job, 2, "torch", restarts=1, threads=1)
    assert sorted(read(tmp_path)) == ["0", "1"]


def test_restarts_run_out(tmp_path: Path, transport: TransportName) -> None:
    with pytest.raises(LaunchError, match=r"(?s)rank 1 was killed by signal 9.*restarted 1 time\)"):
        launch(Job(f"{HERE}:fail", {"out": str(tmp_path), "how": "kill"}), 2, transport, restarts=1, threads=1)


def test_a_users_mistake_is_not_tried_again(tmp_path: Path, transport: TransportName) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(Job(f"{HERE}:fail", {"out": str(tmp_path), "how": "user"}), 2, transport, restarts=3, threads=1)
    assert str(caught.value) == "rank 1 failed: corpus.bin is damaged: build it again"


@pytest.mark.parametrize("place, attempts", [("same", 2), ("another", 4)])
def test_an_exception_is_tried_again_until_it_recurs(tmp_path: Path, place: str, attempts: int) -> None:
    job = Job(f"{HERE}:fail_each_time", {"out": str(tmp_path), "place": place})
    with pytest.raises(LaunchError, match=rf"(?s)ValueError: in step.*restarted {attempts - 1} time"):
        launch(job, 1, "torch", restarts=3, threads=1)
    assert len(read(tmp_path)) == attempts


@pytest.mark.parametrize(
    "entry, message",
    [("nowhere", "not of the form"), (f"{HERE}:nothing", "does not exist"), ("no.such.module:f", "does not exist")],
)
def test_a_wrong_entry_fails_before_any_process(entry: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(Job(entry), 2, "torch", threads=1)


def use_threads_and_launch() -> None:
    """Start OpenMP's threads, then launch a worker that uses threads."""
    torch.set_num_threads(2)
    torch.ones(2**20).exp_()
    launch(Job(f"{HERE}:use_threads", {}), 1, "torch", threads=2)


def test_a_launcher_that_has_used_torch_does_not_hang() -> None:
    launcher = multiprocessing.get_context("spawn").Process(target=use_threads_and_launch, daemon=False)
    launcher.start()
    launcher.join(60)
    if launcher.exitcode is None:
        launcher.kill()
    assert launcher.exitcode == 0


@needs_mpi
def test_a_killed_mpiexec_is_named_and_takes_its_ranks_along(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"mpiexec was killed by signal 9 \(SIGKILL\)"):
        launch(Job(f"{HERE}:kill_mpiexec", {"out": str(tmp_path)}), 2, "mpi", threads=1)
    workers = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=PATIENCE_SECONDS)
    assert not any(psutil.pid_exists(pid) for pid in workers)


@needs_mpi
def test_mpi_abort() -> None:
    with pytest.raises(LaunchError, match=r"^rank 1 failed: it called MPI_Abort with code 7$"):
        launch(Job(f"{HERE}:abort"), 2, "mpi", threads=1)


@needs_mpi
def test_a_temporary_folder_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(LaunchError, match="set TMPDIR to a short local path"):
        launch(Job(f"{HERE}:greet"), 1, "mpi", threads=1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("moves", [False, True])
def test_a_childs_launch_leaves_the_folder_of_its_parents_fork_server(
    method: str, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child's launch once took the folder's lock and died: the next launch removed a folder that the parent needs."""
    folder = Path(get_temp_dir())
    lock, kept = folder / "launcher.lock", tmp_path / "kept"
    if lock.exists():
        lock.rename(kept)
    if moves:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
    child = multiprocessing.get_context(method).Process(target=make_fork_server_folder)
    child.start()
    child.join()
    assert child.exitcode == 0
    sweep(folder.parent)
    assert folder.exists()
    if kept.exists():
        kept.rename(lock)
