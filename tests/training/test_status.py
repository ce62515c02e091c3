"""`meshwright train --status OUT`: alive, ended, killed or never started; and the ranks that wait for other ranks."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.ranks.flight_recorder import Waiting, Whereabouts
from meshwright.ranks.hang import Record
from meshwright.training.status import STATUS, status_of

WAIT = Waiting("data", "all_reduce", 4000, (0, 1), 12, 9.0)


def leave(out: Path, rank: int, state: str, seconds: float, waiting: tuple[Waiting, ...] = ()) -> None:
    where = Whereabouts(5, "pipeline", "F1", waiting, {"data": ((12, "all_reduce", 4000),) if waiting else ()})
    Record(rank, 2, 0, "here", 7, state, seconds, 0.0, where, 600.0).write(out / STATUS)  # type: ignore[arg-type]


def test_where_no_run_was(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--status", str(tmp_path)])
    assert result.exit_code == 1
    assert "no run is alive here" in result.output


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    leave(tmp_path, 0, "ended", 1.0)
    result = CliRunner().invoke(app, ["train", "--status", str(tmp_path)])
    assert result.exit_code == 0
    assert "no run is alive here; the last one ended by itself, after step 5" in " ".join(result.output.split())


def test_a_run_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.status.PATIENCE_SECONDS", 0.3)
    leave(tmp_path, 0, "running", 1.0)
    result = CliRunner().invoke(app, ["train", "--status", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["state"] == "dead"


def test_a_run_that_is_alive_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 renews the record. Rank 1, the rank that rank 0 waits for, does not."""
    monkeypatch.setattr("meshwright.training.status.PATIENCE_SECONDS", 1.5)
    leave(tmp_path, 1, "running", 1.0)
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.1):
            leave(tmp_path, 0, "running", time.monotonic(), (WAIT,))

    leave(tmp_path, 0, "running", 1.0, (WAIT,))
    thread = threading.Thread(target=live)
    thread.start()
    try:
        status = status_of(tmp_path)
    finally:
        over.set()
        thread.join()
    assert (status.state, status.renewed) == ("alive", {0})
    assert "in step 5; no sign of life from rank 1" in status.summary
    assert "rank 1 (here) did not come to all_reduce #12 on axis data (4.0 kB); rank 0 waits for 9 s" in status.waits


@pytest.mark.parametrize(
    "words, message",
    [(["--json"], "no effect on training"), ([], "RUN"), (["a.yaml", "--status", "b"], "--status")],
)
def test_options_that_do_not_go_together(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code != 0
    assert message in f"{result.exception} {result.output}"
