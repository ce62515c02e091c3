"""A schedule decides equally on an asynchronous device and on a synchronous one. No rank waits forever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from meshwright.ranks.grid import Grid
from meshwright.strategies.pipeline.schedule import AXONN, GPIPE, MESSAGE_DRIVEN, ONE_F_ONE_B, ScheduleRule
from tests.rehearsal.async_device import DURATION, Outcome, run_stage
from tests.workers import run_ranks

RULES = {"gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "axonn": AXONN, "message-driven": MESSAGE_DRIVEN}


def run(grid: Grid, rule: ScheduleRule, num_batches: int, durations: Sequence[float] | int, **more: Any) -> Any:
    return run_ranks(run_stage, grid, rule, num_batches, durations, *more.values(), transport="torch")


def at_once(order: list[str]) -> int:
    """Return the number of weight gradients directly after the same microbatch's backward pass."""
    return sum(after == f"W{before[1:]}" for before, after in pairwise(order) if before[0] == "B")


FASTER_FIRST = (DURATION, 4 * DURATION)
"""Seconds of a task on two stages: long enough to keep a busy machine's host ahead of the device."""


def test_weight_gradients_wait_for_what_neighbours_wait_for() -> None:
    """The first stage is faster, so that the last always has a forward pass to do; weight gradients are last."""
    _, last = run(Grid((("data", 1), ("pipe", 2))), MESSAGE_DRIVEN.limited(8), 6, FASTER_FIRST)
    assert at_once(last.order) <= 2, last.order
    assert last.order.index("W0") > last.order.index("F2"), last.order


def test_a_driver_that_asks_at_once_defers_nothing() -> None:
    """A driver that counts an issued task as done is found by the rehearsal."""
    _, last = run(Grid((("data", 1), ("pipe", 2))), MESSAGE_DRIVEN.limited(8), 6, FASTER_FIRST, at_once=True)
    assert at_once(last.order) >= 4, last.order


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RULES)
def test_tasks_of_any_length_come_to_their_end(name: str, seed: int) -> None:
    """No receive begins before the send: such a receive would spin on a GPU."""
    outcomes: list[Outcome] = run(Grid((("data", 1), ("pipe", 3))), RULES[name], 6, seed)
    for outcome in outcomes:
        assert len(outcome.order) == 6 * len(RULES[name].kinds)
        assert outcome.early == 0


@pytest.mark.parametrize("name", RULES)
def test_ranks_of_a_stage_do_the_same_in_the_same_order(name: str) -> None:
    """A fixed order needs no message for each task; hosts would wait for such messages."""
    grid, rule = Grid((("data", 1), ("pipe", 2), ("row", 2))), RULES[name]
    outcomes: list[Outcome] = run(grid, rule, 6, 3)
    for outcome in outcomes:
        assert outcome.told == (0 if rule.fixed else 6 * len(rule.kinds))
    for stage in range(2):
        first, second = outcomes[2 * stage : 2 * stage + 2]
        assert first.order == second.order
