"""The step on the virtual clock: gradients under the backward pass, the optimizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.plan.memory import Peak
from meshwright.planner.plan.passes import Passes, Sum, finish
from meshwright.strategies.pipeline.span import Span, Timeline


def passes(end: float = 10.0) -> Passes:
    last = Span(0, "B0", "backward", end - 4.0, end, 0)
    return Passes(end, Timeline(1, (last,)), (last,), (Peak(0, 0),), (0.0,))


def test_buckets_travel_beside_the_last_task() -> None:
    early = Sum(ready=1.0, reduce=2.0, publish=0.0, steps=0.5, lane=0.0)
    late = Sum(ready=4.0, reduce=2.0, publish=0.0, steps=0.5, lane=0.0)
    made = finish(passes(), [[early, late]], 0.0, streams=False, overlaps=1.0, publishes=1.0)
    assert made.phases == {"passes": 10.0, "data_parallel": pytest.approx(2.0), "optimizer": pytest.approx(1.0)}
    alone = finish(passes(), [[early, late]], 0.0, streams=False, overlaps=0.0, publishes=0.0)
    assert alone.phases["data_parallel"] == pytest.approx(4.0)
    half = finish(passes(), [[early, late]], 0.0, streams=False, overlaps=0.5, publishes=0.5)
    assert half.phases["data_parallel"] == pytest.approx(2.5)  # 3 seconds under the task did 1.5 of the first sum's 2


def test_a_sum_under_the_last_task_slows_the_task() -> None:
    """2 of 4 s of sums are hidden under kernels, which take 1.25 times the usual time: 0.4 s more."""
    early = Sum(ready=1.0, reduce=2.0, publish=0.0, steps=0.5, lane=0.0)
    late = Sum(ready=4.0, reduce=2.0, publish=0.0, steps=0.5, lane=0.0)
    free, taxed = (
        finish(passes(), [[early, late]], 0.0, streams=False, overlaps=1.0, publishes=1.0, tax=tax)
        for tax in (0.0, 0.25)
    )
    assert taxed.seconds - free.seconds == pytest.approx(2 * 0.25 / 1.25)


def test_publishing_slows_the_forward_pass_that_hides_it() -> None:
    first, last = Span(0, "F0", "forward", 0.0, 4.0, 0), Span(0, "B0", "backward", 6.0, 10.0, 0)
    both = Passes(10.0, Timeline(1, (first, last)), (last,), (Peak(0, 0),), (0.0,))
    sums = [Sum(1.0, 0.0, 2.0, 0.5, 0.0, read) for read in (3.0, 0.0)]
    hidden = finish(both, [sums], 0.0, streams=False, overlaps=1.0, publishes=1.0, tax=0.25)
    assert hidden.seconds == pytest.approx(10 + 1 + 2 + 2 * 0.25 / 1.25)
    alone = finish(both, [sums], 0.0, streams=False, overlaps=0.0, publishes=0.0, tax=0.25)
    assert alone.seconds == pytest.approx(10 + 1 + 4)


def test_the_slowest_stage_holds_all_up_and_the_norm_comes_after() -> None:
    last = tuple(Span(stage, "B0", "backward", 0.0, 10.0 - stage, 0) for stage in range(2))
    both = Passes(10.0, Timeline(2, last), last, (Peak(0, 0),) * 2, (0.0, 0.0))
    slow, quick = Sum(9.0, 3.0, 0.0, 1.0, 0.0), Sum(10.0, 1.0, 1.0, 1.0, 0.0)
    made = finish(both, [[quick], [slow]], 0.25, streams=False, overlaps=1.0, publishes=1.0)
    assert made.phases["data_parallel"] == pytest.approx(2.0)
    assert made.seconds == pytest.approx(12.0 + 0.25 + 1.0 + 1.0)


def test_published_values_travel_under_the_next_forward_pass() -> None:
    """Published values are sent in the order of reading: 2 s for values read at once, 2 for values read after 3."""
    first, last = Span(0, "F0", "forward", 0.0, 4.0, 0), Span(0, "B0", "backward", 6.0, 10.0, 0)
    both = Passes(10.0, Timeline(1, (first, last)), (last,), (Peak(0, 0),), (0.0,))
    head, embeddings = (Sum(1.0, 0.0, 2.0, 0.5, 0.0, read) for read in (3.0, 0.0))
    hidden = finish(both, [[head, embeddings]], 0.0, streams=False, overlaps=1.0, publishes=1.0)
    assert hidden.seconds == pytest.approx(10 + 1 + 2)
    assert hidden.phases == {"passes": pytest.approx(12.0), "data_parallel": 0.0, "optimizer": pytest.approx(1.0)}
    alone = finish(both, [[head, embeddings]], 0.0, streams=False, overlaps=0.0, publishes=0.0)
    assert alone.seconds == pytest.approx(10 + 1 + 4)


def test_an_offloaded_optimizer_streams() -> None:
    """An offloaded optimizer steps a bucket while the next is summed, and takes longer to copy than to compute."""
    one = Sum(ready=4.0, reduce=3.0, publish=0.0, steps=0.5, lane=2.0)
    together = finish(passes(), [[one, one]], 0.0, streams=True, overlaps=1.0, publishes=1.0)
    assert together.seconds == pytest.approx(10 + 3 + 3 + 2)
    apart = finish(passes(), [[one, one]], 0.0, streams=False, overlaps=1.0, publishes=1.0)
    assert apart.seconds == pytest.approx(10 + 6 + 1 + 4)


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 3), st.floats(0, 2)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_more_overlap_is_never_slower(parts: list[tuple[float, float, float]]) -> None:
    sums = [Sum(ready, reduce, 0.0, steps, 0.0) for ready, reduce, steps in sorted(parts)]
    made = [
        finish(passes(), [sums], 0.0, streams=False, overlaps=share, publishes=share).seconds
        for share in (0.0, 0.3, 0.7, 1.0)
    ]
    assert all(after <= before + 1e-9 for before, after in pairwise(made))
