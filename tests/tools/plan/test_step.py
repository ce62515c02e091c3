"""The step on the virtual clock: long steps from short ones, gradients under the backward pass, the optimizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.pipeline.span import Span, Timeline
from meshwright.pipeline.task import TaskKind
from meshwright.tools.plan import step
from meshwright.tools.plan.compose import Cost
from meshwright.tools.plan.step import Passes, Peak, Sum, finish, run_passes
from tests.tools.plan.test_predict import config_for


def costs(stage: int, kind: TaskKind, which: int) -> Cost:
    """Stage 1 is slower; the last microbatch has more to do."""
    seconds = {TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 2.0, TaskKind.WEIGHT: 1.0}[kind] * (
        1.25 if stage == 1 else 1.0
    )
    kept = {TaskKind.FORWARD: 10, TaskKind.BACKWARD: -10, TaskKind.WEIGHT: 0}[kind]
    return Cost(seconds + 0.5 * (which == 2), kept, max(kept, 0) + 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "axonn", "message-driven"])
def test_a_long_step_follows_from_two_shorter_ones(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = {"limit": 4} if schedule == "message-driven" else {}
    pipeline = {"size": 3, "schedule": schedule, **limit}
    config = config_for({}, pipeline, "none", batch={"global": 200, "micro": 1})
    exact = run_passes(config, costs, lambda start, end: 0.1)
    monkeypatch.setattr(step, "MOST_TASKS", 200 if schedule == "message-driven" else 1)
    made = run_passes(config, costs, lambda start, end: 0.1)
    assert len(made.timeline.spans) < len(exact.timeline.spans)
    assert made.seconds == pytest.approx(exact.seconds, rel=1e-9)
    assert made.peaks == exact.peaks


def passes(end: float = 10.0) -> Passes:
    last = Span(0, "B0", "backward", end - 4.0, end, 0)
    return Passes(end, Timeline(1, (last,)), (last,), (Peak(0, 0),))


def test_buckets_travel_beside_the_last_task() -> None:
    early = Sum(ready=1.0, reduce=2.0, publish=0.0, steps=0.5, lane=0.0)
    late = Sum(ready=4.0, reduce=2.0, publish=0.0, steps=0.5, lane=0.0)
    made = finish(passes(), [[early, late]], 0.0, streams=False, overlaps=1.0)
    assert made.phases == {"pipeline": 10.0, "data_parallel": pytest.approx(2.0), "optimizer": pytest.approx(1.0)}
    alone = finish(passes(), [[early, late]], 0.0, streams=False, overlaps=0.0)
    assert alone.phases["data_parallel"] == pytest.approx(4.0)
    half = finish(passes(), [[early, late]], 0.0, streams=False, overlaps=0.5)
    assert half.phases["data_parallel"] == pytest.approx(2.5)  # 3 seconds beside the task did 1.5 of the first sum's 2


def test_the_slowest_stage_holds_all_up_and_the_norm_comes_after() -> None:
    last = tuple(Span(stage, "B0", "backward", 0.0, 10.0 - stage, 0) for stage in range(2))
    both = Passes(10.0, Timeline(2, last), last, (Peak(0, 0),) * 2)
    slow, quick = Sum(9.0, 3.0, 0.0, 1.0, 0.0), Sum(10.0, 1.0, 1.0, 1.0, 0.0)
    made = finish(both, [[quick], [slow]], 0.25, streams=False, overlaps=1.0)
    assert made.phases["data_parallel"] == pytest.approx(2.0)
    assert made.seconds == pytest.approx(12.0 + 0.25 + 1.0 + 1.0)


def test_an_offloaded_optimizer_streams() -> None:
    """It steps a bucket while the next is summed; what it moves is more than what it computes."""
    one = Sum(ready=4.0, reduce=3.0, publish=0.0, steps=0.5, lane=2.0)
    together = finish(passes(), [[one, one]], 0.0, streams=True, overlaps=1.0)
    assert together.seconds == pytest.approx(10 + 3 + 3 + 2)
    apart = finish(passes(), [[one, one]], 0.0, streams=False, overlaps=1.0)
    assert apart.seconds == pytest.approx(10 + 6 + 1 + 4)


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 3), st.floats(0, 2)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_more_overlap_is_never_slower(parts: list[tuple[float, float, float]]) -> None:
    sums = [Sum(ready, reduce, 0.0, steps, 0.0) for ready, reduce, steps in sorted(parts)]
    made = [finish(passes(), [sums], 0.0, streams=False, overlaps=share).seconds for share in (0.0, 0.3, 0.7, 1.0)]
    assert all(after <= before + 1e-9 for before, after in pairwise(made))
