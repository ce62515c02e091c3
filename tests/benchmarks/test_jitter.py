"""benchmarks/jitter.py: delays are drawn for tasks, equally for all schedules."""

from __future__ import annotations

import pytest

from benchmarks.jitter import SCHEDULES, main, timed
from benchmarks.paced import Run
from meshwright.strategies.pipeline.task import Task, TaskKind


@pytest.mark.parametrize("delay", [0.1, 0.3])
def test_a_delay_is_a_tasks_and_not_a_schedules(delay: float) -> None:
    task = Task(TaskKind.FORWARD, 3)
    first, second = (Run(name, "jitter", 8, 16, 5, delay).costs(2, task) for name in ("1f1b", "axonn"))
    assert first == second != 1
    assert abs(first - 1) <= delay
    assert Run("1f1b", "jitter", 8, 16, 6, delay).costs(2, task) != first


def test_a_schedule_without_delays_takes_one_time_in_every_round() -> None:
    assert timed("1f1b", 8, 0.0, 1) == timed("1f1b", 8, 0.0, 3)


def test_every_schedule_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--microbatches", "4", "--delays", "0", "0.3", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in SCHEDULES)
    assert printed.count(", 1.000") == len(SCHEDULES), "without delays no schedule is slowed"
