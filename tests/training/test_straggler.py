"""A rank that is slow for many steps is named; one slow step, or the work of another stage, is not."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest
import torch

from meshwright.ranks.flight_recorder import Call, FlightRecorder
from meshwright.ranks.grid import Grid
from meshwright.training.step_report import STEPS, RankClock, Straggler, StragglerWatch
from tests.training.runs import config_for, lines_of, make_corpus, run_as

REPLICAS = Grid((("data", 4), ("pipe", 1)))


def last(watch: StragglerWatch, steps: list[list[float]]) -> Straggler | None:
    found = None
    for own in steps:
        found = watch.step(own)
    return found


def test_a_straggler_is_named_with_how_much_it_costs() -> None:
    found = last(StragglerWatch(REPLICAS), [[1.0, 1.1, 2.0, 0.9]] * STEPS)
    assert found == Straggler(2, pytest.approx(2.0), pytest.approx(1.0))
    assert "rank 2 holds the others up: its own work takes 2.0 times theirs, 1.00 s more" in str(found)


def test_it_takes_some_steps() -> None:
    assert last(StragglerWatch(REPLICAS), [[1.0, 1.0, 9.0, 1.0]] * (STEPS - 1)) is None


def test_one_slow_step_is_none() -> None:
    assert last(StragglerWatch(REPLICAS), [[1.0] * 4] * 9 + [[1.0, 1.0, 100.0, 1.0]]) is None


def test_milliseconds_are_not_worth_a_word() -> None:
    assert last(StragglerWatch(REPLICAS), [[0.003, 0.001, 0.001, 0.001]] * STEPS) is None


def test_stages_have_work_of_their_own() -> None:
    steps = [[1.0, 5.0, 1.0, 5.0]] * STEPS
    assert last(StragglerWatch(Grid((("data", 2), ("pipe", 2)))), steps) is None
    assert last(StragglerWatch(Grid((("data", 1), ("pipe", 4)))), steps) is None


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_others_are_all_but_the_rank_itself(size: int) -> None:
    """The median is right also if several ranks are equally fast."""
    draw = random.Random(size)
    for _ in range(20):
        own = [draw.choice((1.0, 2.0, draw.random())) for _ in range(2 * size)]
        pairs = StragglerWatch(Grid((("data", size), ("pipe", 2)))).beside_peers(own)
        for rank, (mine, theirs) in enumerate(pairs):
            others = [own[peer] for peer in range(2 * size) if peer % 2 == rank % 2 and peer != rank]
            assert (mine, theirs) == (own[rank], statistics.median(others))


def test_waits_are_not_a_ranks_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    recorder = FlightRecorder(clock=lambda: now[0])
    clock = RankClock(torch.device("cpu"), recorder)
    with recorder.waiting(Call("data", "all_reduce", 8, (0, 1), 1)):
        now[0] += 0.25
    assert clock.lap()[1] == 0
    now[0] += 0.5
    assert clock.lap()[1] == 0.5


def test_a_slow_rank_of_a_run_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rank is named in metrics.jsonl, and once on the display."""
    corpus, out = make_corpus(tmp_path), tmp_path / "out"
    layout = {"data": {"size": 3}, "transport": "torch"}
    config = config_for(corpus, layout=layout, steps=2 * STEPS, checkpoint={"every": 0})
    assert run_as("straggles", config, out, straggler=2) == ""
    told = capfd.readouterr().out
    named = [line["straggler"]["rank"] for line in lines_of(out) if line["straggler"] is not None]
    assert named
    assert set(named) == {2}
    assert told.count("rank 2 holds the others up") == 1
