"""Kernels and collectives on their two lanes."""

from __future__ import annotations

import pytest

from meshwright.tools.plan.recorder import Start, WaitFor
from meshwright.tools.plan.timing import DeviceLane, play

A, B = (Start(number, "row", "all_gather", 1) for number in (1, 2))


def seconds(start: Start) -> float:
    return {1: 3.0, 2: 2.0}[start.number]


@pytest.mark.parametrize(
    "steps, overlaps, expected",
    [
        ([1.0, A, WaitFor(1), 1.0], 1.0, 5.0),  # waited for at once
        ([1.0, A, 2.0, WaitFor(1), 1.0], 1.0, 5.0),  # two of its three seconds under a product
        ([1.0, A, 5.0, WaitFor(1), 1.0], 1.0, 7.0),  # hidden
        ([1.0, A, 5.0, WaitFor(1), 1.0], 0.0, 10.0),  # nothing goes on meanwhile
        ([1.0, A, 5.0, WaitFor(1), 1.0], 0.5, 8.5),
        ([A, B, WaitFor(2), WaitFor(1)], 1.0, 5.0),  # one after the other
        ([A, B, WaitFor(2), WaitFor(1)], 0.0, 5.0),
        ([A, 1.0], 1.0, 1.0),  # nobody waits
    ],
)
def test_play(steps: list[DeviceLane], overlaps: float, expected: float) -> None:
    assert play(steps, seconds, overlaps) == pytest.approx(expected)


def test_a_rank_that_leads_is_faster_while_the_others_wait() -> None:
    """4 s of its own at twice the pace, a broadcast, 3 s of all, a sum to it beside 1 s of all, 2 s of its own."""
    steps: list[DeviceLane] = [
        4.0,
        Start(1, "branch", "broadcast", 8),
        WaitFor(1),
        3.0,
        Start(2, "branch", "reduce", 8),
        1.0,
        WaitFor(2),
        2.0,
    ]
    assert play(steps, lambda start: 0.5, 0.0, 2.0) == pytest.approx(2 + 0.5 + 3 + 1 + 0.5 + 1)
