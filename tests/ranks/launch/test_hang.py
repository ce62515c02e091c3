"""A rank waits too long: the message names the missing rank and call, no process is left, and a restart applies."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest

from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch import Job, launch
from meshwright.ranks.transports import TransportName
from tests.patience import PATIENCE_SECONDS
from tests.ranks.launch.conftest import needs_mpi

on_each = pytest.mark.parametrize("transport", ["torch", pytest.param("mpi", marks=[needs_mpi, pytest.mark.long])])
"""MPI's ranks spin while waiting; a stopped rank and a rank that never joins are always tried over both."""

NOTICED_SECONDS = 60
"""Far above the time needed, since the machine may be busy, and far below any timeout of a library."""


def hung(tmp_path: Path, transport: TransportName, how: str, num_ranks: int = 2, **arguments: float) -> str:
    """Return the message of a job that hangs, after checking that all processes of the job have ended."""
    status = tmp_path / "status"
    given = {"transport": transport, "how": how, "out": str(tmp_path), **arguments}
    with pytest.raises(LaunchError) as caught:
        launch(Job("tests.ranks.launch.hang_entries:hang", given, str(status)), num_ranks, transport, threads=1)
    begun = max((path.stat().st_mtime for path in tmp_path.glob("pid-*")), default=time.time())
    assert time.time() - begun < NOTICED_SECONDS
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=PATIENCE_SECONDS)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    return str(caught.value)


def test_a_stopped_rank_is_named(tmp_path: Path, transport: TransportName) -> None:
    message = hung(tmp_path, transport, "stand_still", num_ranks=3)
    first, *rest = message.splitlines()
    assert "rank 2 (" in first
    assert "did not come to all_reduce #3 on axis data (4.0 kB); ranks 0, 1 wait" in first
    assert any("rank 2" in line and "step 7" in line and "was stopped (SIGSTOP)" in line for line in rest)


@on_each
def test_a_rank_that_computes_for_ever_tells_where(tmp_path: Path, transport: TransportName) -> None:
    message = hung(tmp_path, transport, "compute")
    assert "rank 1 (" in message
    assert "did not come to all_reduce #3 on axis data (4.0 kB); rank 0 waits" in message
    assert "waits for nobody, in step 0, data" in message
    assert 'hang_entries.py", line' in message
    assert "time.sleep(600)" in message


@on_each
def test_a_forgotten_collective_is_named(tmp_path: Path, transport: TransportName) -> None:
    message = hung(tmp_path, transport, "skip", num_ranks=3)
    assert "all_reduce #3 on axis data (4.0 kB)" in message
    assert "rank 1 in barrier #3 on axis data" in message
    assert "they have parted" in message


@on_each
def test_a_stage_that_never_sends_is_named(tmp_path: Path, transport: TransportName) -> None:
    message = hung(tmp_path, transport, "say_nothing")
    assert "rank 0 (" in message
    assert "sent nothing on axis data; rank 1 waits" in message
    assert "task F3" in message


@needs_mpi
def test_a_rank_that_has_left_is_named(tmp_path: Path) -> None:
    """Over gloo the left rank's connections break, which is an error at once."""
    message = hung(tmp_path, "mpi", "leave_early")
    assert "did not come to barrier #3 on axis data; rank 0 waits" in message


def test_a_rank_that_never_joins_is_named(tmp_path: Path, transport: TransportName) -> None:
    message = hung(tmp_path, transport, "never_join", num_ranks=3)
    assert re.search(r"2 of 3 ranks came to .* within 8 s \(timeout.join\).*; missing: rank 1$", message)


@on_each
def test_a_hang_counts_as_a_lost_rank(tmp_path: Path, transport: TransportName) -> None:
    arguments = {"transport": transport, "how": "stand_still", "out": str(tmp_path)}
    launch(Job("tests.ranks.launch.hang_entries:hang", arguments, None), 2, transport, restarts=1, threads=1)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]
