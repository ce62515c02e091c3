"""Kernels and collectives on two lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.plan.recorder import Start, WaitFor
from meshwright.planner.plan.timing import Kernels, Step, play

A, B = (Start(number, "row", "all_gather", 1) for number in (1, 2))


def seconds(start: Start) -> float:
    return {1: 3.0, 2: 2.0}[start.number]


def kernels(steps: list[float | Start | WaitFor]) -> list[Step]:
    return [Kernels(step) if isinstance(step, float) else step for step in steps]


@pytest.mark.parametrize(
    "steps, overlaps, expected",
    [
        ([1.0, A, WaitFor(1), 1.0], 1.0, 5.0),  # waited for at once
        ([1.0, A, 2.0, WaitFor(1), 1.0], 1.0, 5.0),  # two of the collective's three seconds under a product
        ([1.0, A, 5.0, WaitFor(1), 1.0], 1.0, 7.0),  # hidden
        ([1.0, A, 5.0, WaitFor(1), 1.0], 0.0, 10.0),  # nothing runs meanwhile
        ([1.0, A, 5.0, WaitFor(1), 1.0], 0.5, 8.5),
        ([A, B, WaitFor(2), WaitFor(1)], 1.0, 5.0),  # one after the other
        ([A, B, WaitFor(2), WaitFor(1)], 0.0, 5.0),
        ([A, 1.0], 1.0, 1.0),  # without a wait
    ],
)
def test_play(steps: list[float | Start | WaitFor], overlaps: float, expected: float) -> None:
    assert play(kernels(steps), seconds, overlaps) == pytest.approx(expected)


@pytest.mark.parametrize(
    "steps, overlaps, expected",
    [
        ([1.0, A, 2.0, WaitFor(1), 1.0], 1.0, 5.0),  # a product of 2.5 s under a gather of 3
        ([1.0, A, 5.0, WaitFor(1), 1.0], 1.0, 7.6),  # 3 s at 0.8 of the pace
        ([1.0, A, 2.4, WaitFor(1), 1.0], 1.0, 5.0),
        ([A, 1.0, 1.4, WaitFor(1)], 1.0, 3.0),
        ([1.0, A, 5.0, WaitFor(1), 1.0], 0.0, 10.0),  # a collective that does not run meanwhile slows nothing
    ],
)
def test_kernels_under_a_collective_are_slower(
    steps: list[float | Start | WaitFor], overlaps: float, expected: float
) -> None:
    assert play(kernels(steps), seconds, overlaps, tax=0.25) == pytest.approx(expected)


def test_a_rank_that_leads_is_faster_while_the_others_wait() -> None:
    """The leader computes 4 s at twice the pace, broadcasts, computes 3 s with all ranks and 1 s next to a sum, and 2 s
    alone."""
    steps: list[float | Start | WaitFor] = [
        4.0,
        Start(1, "branch", "broadcast", 8),
        WaitFor(1),
        3.0,
        Start(2, "branch", "reduce", 8),
        1.0,
        WaitFor(2),
        2.0,
    ]
    assert play(kernels(steps), lambda start: 0.5, 0.0, 2.0) == pytest.approx(2 + 0.5 + 3 + 1 + 0.5 + 1)


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=12), st.floats(0.0, 5.0))
def test_a_kernel_begins_when_it_is_issued_and_the_one_before_is_done(devices: list[float], issue: float) -> None:
    row, done = Kernels(), 0.0
    for number, device in enumerate(devices, 1):
        row = row.then(Kernels(device, issue, issue + device))
        done = max(done, number * issue) + device
    assert play([row], seconds, 1.0) == pytest.approx(done)
    late = [Kernels(7.0), row, A, WaitFor(1)]
    whole = play(late, seconds, 1.0, issue=issue)
    assert whole == pytest.approx(max(7.0 + sum(devices), done, (len(devices) + 1) * issue) + 3.0)
