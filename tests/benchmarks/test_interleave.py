"""A table of a benchmark says what it was measured on, and beside what."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import interleave
from benchmarks.contender import Contender
from benchmarks.interleave import Plan, Result, machine, plan_arguments, plan_of, show, write_json

LOOP = [sys.executable, "-c", "while True: pass"]


def busy() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline() == LOOP]


class Team:
    """A contender whose step takes as many milliseconds as there are busy processes beside it."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        pass

    def run(self, steps: int) -> tuple[list[float], float]:
        return [float(len(busy()))] * steps, 1.0

    def close(self) -> None:
        pass


def contender(name: str) -> Contender:
    return Contender(name, "benchmarks.ours:serial")


def test_busy_processes_run_beside_the_rounds_and_end_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "Team", Team)
    plan = plan_of(plan_arguments("").parse_args(["--rounds", "2", "--steps", "1", "--busy", "2"]))
    (result,) = interleave.interleave([contender("a")], plan)
    assert (plan.busy, result.rounds, result.busy) == (2, [2.0, 2.0], 2)
    assert busy() == []


def test_a_table_names_the_processor_and_its_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show("steps", [Result(contender("a"), [2.0], 1.0, 1), Result(contender("b"), [4.0], 1.0, 1)], ["a"])
    said = " ".join(capsys.readouterr().out.split())
    assert "steps, beside 1 busy process" in said
    assert machine() in said
    assert "2.000" in said
    write_json(tmp_path / "kept.json", {"steps": []})
    assert machine() in (tmp_path / "kept.json").read_text()
    assert Plan().busy == 0
