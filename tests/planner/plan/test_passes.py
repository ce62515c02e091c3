"""The pipeline phase of a long step equals the whole simulation's, though few microbatches are simulated."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.planner.plan import passes
from meshwright.planner.plan.passes import Passes, PipelinePhase
from meshwright.planner.plan.recorder import Cost
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import AXONN, GPIPE, MESSAGE_DRIVEN, ONE_F_ONE_B, ScheduleRule
from meshwright.strategies.pipeline.task import TaskKind

RULES = {
    "gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "axonn": AXONN, "message-driven": MESSAGE_DRIVEN,
    "few": MESSAGE_DRIVEN.limited(2), "many": AXONN.limited(9),
}  # fmt: skip

LOOP, V = ChunkPlacement(4, 2), ChunkPlacement(4, 2, "v")
CHUNKED = [
    (ONE_F_ONE_B, LOOP, 149), (ONE_F_ONE_B, LOOP, 150), (ONE_F_ONE_B, ChunkPlacement(3, 3), 148),
    (MESSAGE_DRIVEN, V, 150), (MESSAGE_DRIVEN.limited(4), V, 150), (MESSAGE_DRIVEN.limited(8), LOOP, 149),
    (MESSAGE_DRIVEN.limited(8), V, 150),  # ZB-V's order of F and B
]  # fmt: skip


def pipeline(rule: ScheduleRule, placement: ChunkPlacement, count: int, seed: int, unequal: float) -> PipelinePhase:
    """Return a phase with a speed for each position and link; the first and the last microbatch take longer."""
    drawn, positions = random.Random(seed), placement.num_positions
    speed = [{kind: 1 + unequal * drawn.random() for kind in TaskKind} for _ in range(positions)]
    hops = [unequal * drawn.random() / 3 for _ in range(positions)]

    def costs(position: int, kind: TaskKind, which: int) -> Cost:
        base = {TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 2.0, TaskKind.WEIGHT: 1.0}[kind]
        whole = 10 + which % 2
        kept = {rule.kinds[0]: whole, rule.kinds[1]: -4, TaskKind.WEIGHT: 4 - whole}[kind]
        if kind is TaskKind.BACKWARD and not rule.splits:
            kept = -whole
        return Cost(base * speed[position][kind] + 0.5 * (which != 1), kept, 13 + which)

    return PipelinePhase(rule, placement, count, costs, lambda start, end: hops[min(start, end)], None)


def both(rule: ScheduleRule, placement: ChunkPlacement, count: int, seed: int, unequal: float) -> tuple[Passes, Passes]:
    """Return the step derived from a shorter step, and the step simulated whole; check the lower bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "WHOLE_TASKS", 0)
        steps = pipeline(rule, placement, count, seed, unequal)
        whole = steps.simulated(count)
        assert len(steps.beginning.timeline.spans) < len(whole.timeline.spans)
        if not rule.fixed:
            assert count * steps.slowest <= steps.least_seconds() <= whole.seconds * (1 + 1e-12)
        return steps.whole, whole


@given(
    st.sampled_from(sorted(RULES)), st.integers(1, 5), st.integers(100, 150), st.integers(0, 999),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)  # fmt: skip
@example("gpipe", 4, 150, 3, 0.02)
@example("message-driven", 5, 151, 7, 0.02)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_long_step_follows_from_a_shorter_one(name: str, stages: int, count: int, seed: int, unequal: float) -> None:
    one, whole = both(RULES[name], ChunkPlacement(stages), count, seed, unequal)
    exact = name in ("gpipe", "1f1b", "axonn", "few")  # other schedules may get the pace of the slowest stage
    assert one.seconds == pytest.approx(whole.seconds, rel=1e-12 if exact else 5e-3)
    if exact:
        assert one.peaks == whole.peaks
        ends = [[span.end_seconds for span in each.last] for each in (one, whole)]
        assert ends[0] == pytest.approx(ends[1], rel=1e-12)
        assert one.idle_share == pytest.approx(whole.idle_share, abs=1e-12)


@pytest.mark.parametrize("rule, placement, count", CHUNKED)
def test_a_long_step_of_several_chunks(rule: ScheduleRule, placement: ChunkPlacement, count: int) -> None:
    """Rounds of an interleaved step stay whole; a step that returns to a state has the whole simulation's end and
    memory."""
    one, whole = both(rule, placement, count, 3, 0.3)
    fixed = rule.fixed or rule.limit(0, 1, 1) == 4
    assert one.seconds == pytest.approx(whole.seconds, rel=1e-12 if fixed else 5e-3)
    if fixed:
        assert one.peaks == whole.peaks
        assert one.idle_share == pytest.approx(whole.idle_share, abs=1e-12)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_step_of_many_microbatches_simulates_few(name: str) -> None:
    few, many = (pipeline(RULES[name], ChunkPlacement(4), count, 1, 0.3).whole for count in (5_000, 5_000_000))
    assert len(many.timeline.spans) == len(few.timeline.spans) <= passes.WHOLE_TASKS
    assert many.seconds == pytest.approx(1000 * few.seconds, rel=0.01)
