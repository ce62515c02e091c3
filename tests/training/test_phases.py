"""Phases follow each other, add up, and tell waits from work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.training.phases import PHASES, PhaseClock

NAP = 0.02


def slow(count: int) -> Iterator[int]:
    """Yield each index after a nap."""
    for index in range(count):
        time.sleep(NAP)
        yield index


def test_waits_are_told_from_the_work_between_them() -> None:
    """Two waits of one nap each, and two naps of work after each."""
    recorder = FlightRecorder()
    start, clock = time.monotonic(), PhaseClock(torch.device("cpu"), recorder)
    clock.begin("passes")
    assert recorder.phase == "forward and backward"
    time.sleep(NAP)
    clock.begin(None)
    time.sleep(4 * NAP)
    for _ in clock.waiting(slow(2)):
        time.sleep(2 * NAP)
    clock.begin(None)
    seconds = clock.seconds()
    assert list(seconds) == ["passes", "data_parallel", "optimizer"]
    elsewhere = time.monotonic() - start - (1 + 4 + 2 + 4) * NAP  # naps last longer on a busy machine
    for phase, naps in {"passes": 1, "data_parallel": 2, "optimizer": 4}.items():
        assert naps * NAP <= seconds[phase] <= naps * NAP + elsewhere, phase


def test_spans_do_not_overlap() -> None:
    clock = PhaseClock(torch.device("cpu"), FlightRecorder())
    clock.begin("passes")
    assert list(clock.waiting(slow(2))) == [0, 1]
    clock.begin(None)
    spans = clock.spans(3)
    assert [span.name for span in spans] == ["data_parallel", "optimizer"] * 3
    assert {(span.stage, span.microbatch) for span in spans} == {(3, None)}
    assert all(before.end_seconds <= after.start_seconds for before, after in pairwise(spans))
    assert sum(span.seconds for span in spans) == pytest.approx(sum(list(clock.seconds().values())[1:]))


def test_a_step_that_was_not_made() -> None:
    assert PhaseClock(torch.device("cpu"), FlightRecorder()).seconds() == dict.fromkeys(PHASES, 0.0)
