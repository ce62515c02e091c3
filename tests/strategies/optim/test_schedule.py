"""Learning rates at the corners of every schedule."""

from __future__ import annotations

import math

import pytest

from meshwright.config.schema import ScheduleSection
from meshwright.strategies.optim.optimizer import learning_rate


def rates(decay: str, warmup: int, steps: int, floor: float = 0.1, stable: float = 0.0) -> list[float]:
    schedule = ScheduleSection.model_validate({"decay": decay, "warmup": warmup, "floor": floor, "stable": stable})
    return [learning_rate(2.0, schedule, step, steps) for step in range(steps)]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "sqrt"])
def test_warmup_climbs_to_the_peak_in_equal_steps(decay: str) -> None:
    assert rates(decay, 4, 10)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "sqrt"])
def test_without_warmup_begins_at_the_peak(decay: str) -> None:
    assert rates(decay, 0, 10)[0] == 2.0


def test_constant() -> None:
    assert rates("constant", 2, 6) == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_linear_falls_evenly_towards_the_floor() -> None:
    falling = rates("linear", 2, 12, floor=0.1)[2:]
    assert falling == pytest.approx([2.0 - 0.18 * index for index in range(10)])


def test_cosine_is_half_way_between_peak_and_floor_in_the_middle() -> None:
    falling = rates("cosine", 2, 12, floor=0.1)[2:]
    assert falling[5] == pytest.approx((2.0 + 0.2) / 2)
    assert falling == pytest.approx([0.2 + 1.8 * (1 + math.cos(math.pi * index / 10)) / 2 for index in range(10)])


def test_wsd_stays_at_the_peak_and_falls_at_the_end() -> None:
    shape = rates("sqrt", 2, 22, floor=0.0, stable=0.8)
    assert shape[:18] == [1.0] + [2.0] * 17
    assert shape[18:] == pytest.approx([2.0 * (1 - math.sqrt(index / 4)) for index in range(4)])
    assert rates("linear", 0, 10, floor=0.0, stable=0.5)[4:] == pytest.approx([2.0, 2.0, 1.6, 1.2, 0.8, 0.4])


def test_inverse_sqrt_halves_at_four_times_the_warmup_whatever_the_end() -> None:
    falling = rates("inverse-sqrt", 4, 100, floor=0.25)
    assert falling[:4] == [0.5, 1.0, 1.5, 2.0]
    assert falling[15] == pytest.approx(1.0)
    assert falling[63:] == pytest.approx([0.5] * 37)
    assert rates("inverse-sqrt", 4, 50, floor=0.25) == falling[:50]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "sqrt"])
def test_all_warmup(decay: str) -> None:
    assert rates(decay, 3, 3) == pytest.approx([2 / 3, 4 / 3, 2.0])
