"""Forecasts of counted work on the virtual clock, checked by hand if possible."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import Config
from meshwright.planner.explain.tables import Forecast, compose, forecast
from tests.oracle.pipeline import WHOLE, laid_out, pipelined


def forecast_of(config: Config) -> Forecast:
    return forecast(compose(config))


def of(schedule: str, **pipeline: Any) -> Forecast:
    """Forecast two stages of two layers and four microbatches."""
    return forecast_of(laid_out(pipelined("gpt2", 2, schedule, WHOLE), pipeline={"partition": (2, 2)} | pipeline))


def test_gpipe_by_hand() -> None:
    """The forward pass takes n times the slower stage and once the faster stage; the backward pass takes twice this
    time."""
    made = of("gpipe")
    slow, fast = max(made.shares), min(made.shares)
    assert made.schedule == "gpipe"
    assert slow + fast == pytest.approx(1)
    assert made.limits == (4, 4)
    assert made.chosen.total_seconds == pytest.approx(3 * (4 * slow + fast))
    assert sum(made.chosen.idle_shares) == pytest.approx(2 - 12 / made.chosen.total_seconds)


def test_work_is_the_same_under_every_schedule() -> None:
    """Each stage's tasks take 3 forward passes of the stage's share a microbatch, with B and W split or whole."""
    made = of("message-driven")
    for timeline in made.timelines.values():
        for stage, share in enumerate(made.shares):
            busy = sum(span.seconds for span in timeline.spans if span.stage == stage)
            assert busy == pytest.approx(3 * 4 * share)


def test_limits_are_the_run_s() -> None:
    assert of("1f1b").limits == (2, 1)
    assert of("message-driven", limit=1).limits == (1, 1)
    alone = of("message-driven", limit=1)
    assert alone.chosen.total_seconds > of("message-driven", limit=3).chosen.total_seconds
    assert alone.timelines["gpipe"] == of("gpipe").chosen


def test_partition_is_measured_once() -> None:
    """Stages of a measured partition fit together, though no two measurements are equal."""
    config = laid_out(pipelined("gpt2", 3, "1f1b", WHOLE), pipeline={"partition": "measured"})
    explained = compose(config)
    layers = tuple(map(len, explained.layers))
    assert explained.run.config.layout.pipeline.partition == layers
    assert sum(layers) == config.model.layers
