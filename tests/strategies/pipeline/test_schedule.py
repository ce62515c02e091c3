"""Each schedule's decisions, and the common rules of all schedules."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.schedule import (
    AXONN,
    FORWARD_ONLY,
    GPIPE,
    MESSAGE_DRIVEN,
    ONE_F_ONE_B,
    WHOLE,
    ScheduleRule,
    forward_first,
    in_order,
)
from meshwright.strategies.pipeline.span import Span, Timeline
from meshwright.strategies.pipeline.task import Task, TaskKind

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}


def orders(timeline: Timeline) -> list[str]:
    """Return the tasks of each stage, in order."""
    names: dict[int, list[str]] = defaultdict(list)
    for span in sorted(timeline.tasks, key=lambda span: span.start_seconds):
        names[span.stage].append(span.name)
    return [" ".join(names[stage]) for stage in range(timeline.num_stages)]


def unit(stage: int, task: Task) -> float:
    """Return the seconds of a forward pass for each of F, B and W."""
    return 1.0


def unit_whole(stage: int, task: Task) -> float:
    """Return two forward passes for an unsplit backward pass."""
    return 2.0 if task.kind is TaskKind.BACKWARD else 1.0


def at_once(a: int, b: int, message: Task) -> float:
    return 0.0


def test_gpipe() -> None:
    assert orders(simulate(2, 3, GPIPE, unit_whole, at_once)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b() -> None:
    assert orders(simulate(3, 5, ONE_F_ONE_B, unit_whole, at_once)) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_axonn() -> None:
    """The first stage injects two microbatches, then one after each backward pass; the last stage runs backward at
    once."""
    assert orders(simulate(2, 4, AXONN, unit_whole, at_once)) == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_axonn_acts_on_what_came_first() -> None:
    view = AXONN.limited(3).view(1, 3, 3).with_arrival(TaskKind.FORWARD).with_arrival(TaskKind.FORWARD)
    view = view.after(Task(TaskKind.FORWARD, 0)).with_arrival(TaskKind.BACKWARD)
    assert AXONN.schedule(view) == Task(TaskKind.FORWARD, 1)
    assert MESSAGE_DRIVEN.schedule(MESSAGE_DRIVEN.view(1, 3, 3)) is None
    late = AXONN.limited(3).view(1, 3, 3).with_arrival(TaskKind.FORWARD).after(Task(TaskKind.FORWARD, 0))
    late = late.with_arrival(TaskKind.BACKWARD).with_arrival(TaskKind.FORWARD)
    assert AXONN.schedule(late) == Task(TaskKind.BACKWARD, 0)


def test_message_driven_fills_waits_with_weight_gradients() -> None:
    assert orders(simulate(2, 3, MESSAGE_DRIVEN, unit, at_once)) == [
        "F0 F1 F2 B0 W0 B1 W1 B2 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]


def test_message_driven_at_its_limit_makes_room() -> None:
    assert orders(simulate(2, 3, MESSAGE_DRIVEN.limited(1), unit, at_once)) == ["F0 B0 W0 F1 B1 W1 F2 B2 W2"] * 2


def test_forward_only_holds_nothing() -> None:
    timeline = simulate(3, 4, FORWARD_ONLY, unit, at_once)
    assert orders(timeline) == ["F0 F1 F2 F3"] * 3
    assert timeline.total_seconds == 6


@pytest.mark.parametrize("rule", [GPIPE, ONE_F_ONE_B], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 32])
def test_textbook_bubble(rule: ScheduleRule, num_stages: int, num_microbatches: int) -> None:
    """Without latency a step takes (n + p - 1)(F + B), and a stage is idle for (p - 1) / (n + p - 1) of the step."""
    timeline = simulate(num_stages, num_microbatches, rule, unit_whole, at_once)
    assert timeline.total_seconds == 3 * (num_microbatches + num_stages - 1)
    bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert timeline.idle_shares == pytest.approx([bubble] * num_stages)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [8, 32])
def test_message_driven_has_only_the_bubble_of_the_first_forward(num_stages: int, num_microbatches: int) -> None:
    """Without latency, with the limit at 2p and n >= p: (p - 1) F until the last stage begins, and no later wait of
    this stage.

    No schedule can be shorter: the last stage has 3 n of work, and no earlier task.
    """
    timeline = simulate(num_stages, num_microbatches, MESSAGE_DRIVEN, unit, at_once)
    assert timeline.total_seconds == num_stages - 1 + 3 * num_microbatches


def test_rising_limits_deadlock_a_static_order() -> None:
    """Stage 0 waits for a first gradient, stage 1 for a second activation: the deadlock is an error, not a hang."""
    planted = ScheduleRule(in_order, WHOLE, lambda stage, num_stages, num_microbatches: stage + 1, order=forward_first)
    with pytest.raises(AssertionError, match="deadlock: all wait, and no message is under way: stage 0, stage 1"):
        simulate(2, 3, planted, unit_whole, at_once)


def check(timeline: Timeline, rule: ScheduleRule, num_microbatches: int) -> None:
    """Assert every task once, each kind in order, one task at a time, after the task's inputs, and within the limit."""
    ends = {(span.stage, span.name): span.end_seconds for span in timeline.spans}
    kinds = [str(kind) for kind in rule.kinds]
    by_stage: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_stage[span.stage].append(span)
    for stage in range(timeline.num_stages):
        spans, last = by_stage[stage], timeline.num_stages - 1
        for kind in kinds:
            names = [span.name for span in spans if span.name[0] == kind]
            assert names == [f"{kind}{index}" for index in range(num_microbatches)]
        assert len(spans) == len(kinds) * num_microbatches
        assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(spans))
        limit, held = rule.limit(stage, timeline.num_stages, num_microbatches), 0
        for span in spans:
            kind, index = LETTERS[span.category], span.microbatch
            held += (kind == "F") - (kind == kinds[-1])
            assert held <= limit
            needs = {"F": (stage - 1, f"F{index}"), "B": (stage + 1, f"B{index}"), "W": (stage, f"B{index}")}[kind]
            if kind == "B":
                assert ends[stage, f"F{index}"] <= span.start_seconds
            if (kind, stage) not in (("F", 0), ("B", last)):
                assert ends[needs] <= span.start_seconds
        assert held == 0


def message_driven_at(limits: list[int]) -> ScheduleRule:
    """Return message-driven with any limits, also rising and falling from stage to stage."""
    return ScheduleRule(
        MESSAGE_DRIVEN.schedule,
        MESSAGE_DRIVEN.kinds,
        lambda stage, num_stages, num_microbatches: limits[stage % len(limits)],
    )


LIMITED = st.integers(1, 10)
ANY_RULE = st.one_of(
    st.sampled_from([GPIPE, ONE_F_ONE_B, AXONN, MESSAGE_DRIVEN, FORWARD_ONLY]),
    LIMITED.map(GPIPE.limited),
    LIMITED.map(AXONN.limited),
    st.lists(LIMITED, min_size=1, max_size=6).map(message_driven_at),
)


@given(
    rule=ANY_RULE,
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 14),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
)
def test_any_pipeline_ends(
    rule: ScheduleRule, num_stages: int, num_microbatches: int, seed: int, spread: float
) -> None:
    """Any durations and latencies end; with a wide spread, messages overtake each other. Some tasks take no time at
    all."""
    draw = random.Random(seed)

    def costs(stage: int, task: Task) -> float:
        return draw.choice([0.0, 1.0, draw.random() * (1 + spread)])

    def latency(a: int, b: int, message: Task) -> float:
        return draw.choice([0.0, spread * draw.random()])

    check(simulate(num_stages, num_microbatches, rule, costs, latency), rule, num_microbatches)
