"""A step on the virtual clock: the pipeline's own engine, then gradients' sums, the optimizer, publishing.

Each stage's ranks do the same at the same time, so one of them stands for all. Buckets leave when the last task that
writes them has passed the links of their parameters, and travel one after the other beside what is left of it. The
optimizer begins when all gradients are there and the norm is known; an offloaded one that does not need the norm takes
each bucket as it comes.

A step of many microbatches is the same thing over and over in its middle: beyond MOST_TASKS it is run with fewer,
twice, and what one microbatch adds is taken so many times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshwright.config import Config
from meshwright.parts import rule_of
from meshwright.pipeline.clock import Pace, simulate, undisturbed
from meshwright.pipeline.schedule import ScheduleRule
from meshwright.pipeline.span import Span, Timeline, phase_span
from meshwright.pipeline.task import Task, TaskKind
from meshwright.tools.plan.buckets import Peak
from meshwright.tools.plan.compose import Cost
from meshwright.tools.plan.recordings import place, splits
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PIPELINE

MOST_TASKS = 8_000

TaskCosts = Callable[[int, TaskKind, int], Cost]
"""costs(stage, kind, place): of a task of a microbatch at a place of the step (recordings.place)."""
Latency = Callable[[int, int], float]
"""latency(from, to): seconds of a message between neighbouring stages."""


@dataclass(frozen=True)
class Passes:
    """The pipeline phase: its seconds, spans (of fewer microbatches, where there are many), each stage's last task."""

    seconds: float
    timeline: Timeline
    last: tuple[Span, ...]
    peaks: tuple[Peak, ...]


@dataclass(frozen=True)
class Sum:
    """A bucket's way: `ready`: seconds of its stage's last task after which it may leave; `reduce`, `publish`: seconds
    of its collectives; `steps`: of its optimizer step; `lane`: of what must be fetched and written back for it."""

    ready: float
    reduce: float
    publish: float
    steps: float
    lane: float


def run_passes(config: Config, costs: TaskCosts, latency: Latency, pace: Pace = undisturbed) -> Passes:
    """All microbatches of a step. `costs`: while all stages are at work; `pace`: how much faster fewer of them are."""
    stages, count = config.layout.pipeline.size, config.num_microbatches
    rule = rule_of(config)
    kinds, rounds = (3, 4) if splits(config) else (2, 2)  # where weight gradients fill waits, it takes longer
    most = max(MOST_TASKS // (stages * kinds), rounds * _depth(rule, stages, count) + 4)
    if count <= most:
        return _run(rule, stages, count, count, costs, latency, pace)
    fewer = 3 * most // 4  # both are long enough to have come to the middle
    longer, shorter = (_run(rule, stages, some, count, costs, latency, pace) for some in (most, fewer))
    fills = rule.limit(0, stages, count) == count
    return _extrapolated(longer, shorter, count - most, most - fewer, fills=fills)


def _depth(rule: ScheduleRule, stages: int, count: int) -> int:
    """The microbatches of a step before its middle repeats itself: as many as are in flight, of which a limit that
    grows with the step is no measure."""
    limit = rule.limit(0, stages, count)
    return stages if limit == count else max(limit, stages)


def _run(
    rule: ScheduleRule, stages: int, some: int, count: int, costs: TaskCosts, latency: Latency, pace: Pace
) -> Passes:
    """Simulate `some` microbatches, whose places are those of a step of `count`."""
    known: dict[tuple[int, TaskKind, int], Cost] = {}
    hop = cache(latency)

    def cost(stage: int, task: Task) -> Cost:
        index = task.microbatch if task.microbatch < some - 1 else count - 1
        key = stage, task.kind, place(index, count)
        if key not in known:
            known[key] = costs(*key)
        return known[key]

    timeline = simulate(
        stages,
        some,
        rule,
        lambda stage, task: cost(stage, task).seconds,
        lambda start, end, task: hop(start, end),
        pace,
    )
    of_stage: list[list[Span]] = [[] for _ in range(stages)]
    for span in timeline.spans:  # in the order in which they begin
        of_stage[span.stage].append(span)
    kinds = {str(kind): kind for kind in TaskKind}

    def costs_of(stage: int) -> list[Cost]:
        return [cost(stage, Task(kinds[span.name[0]], span.microbatch or 0)) for span in of_stage[stage]]

    peaks = tuple(_peak(costs_of(stage)) for stage in range(stages))
    last = tuple(spans[-1] for spans in of_stage)
    return Passes(timeline.total_seconds, timeline, last, peaks)


def _peak(costs: Sequence[Cost]) -> Peak:
    live = kept = most = 0
    for cost in costs:
        most = max(most, live + cost.peak_bytes)
        live += cost.kept_bytes
        kept = max(kept, live)
    return Peak(kept, most)


def _extrapolated(longer: Passes, shorter: Passes, more: int, difference: int, *, fills: bool) -> Passes:
    """The longer step with so many more microbatches; it has `difference` more than the shorter one. `fills`: each may
    take more memory; else a limit has been reached."""

    def beyond(long: float, short: float) -> float:
        return more * (long - short) / difference

    seconds = beyond(longer.seconds, shorter.seconds)
    last = tuple(
        replace(span, start_seconds=span.start_seconds + seconds, end_seconds=span.end_seconds + seconds)
        for span in longer.last
    )
    peaks = longer.peaks
    if fills:
        peaks = tuple(
            Peak(
                long.activation_bytes + round(beyond(long.activation_bytes, short.activation_bytes)),
                long.total_bytes + round(beyond(long.total_bytes, short.total_bytes)),
            )
            for long, short in zip(longer.peaks, shorter.peaks, strict=True)
        )
    return Passes(longer.seconds + seconds, longer.timeline, last, peaks)


@dataclass(frozen=True)
class _Step:
    """`phases`: seconds by name (training/phases.py), of the step's longest way through the stages."""

    seconds: float
    phases: dict[str, float]
    timeline: Timeline


def finish(
    passes: Passes, sums: Sequence[Sequence[Sum]], norm_seconds: float, *, streams: bool, overlaps: float
) -> _Step:
    """The step's end. `sums`: each stage's buckets, in the order in which they leave; `norm_seconds`: of the
    collectives that all ranks join in before the optimizer; `streams`: whether it steps a bucket when it has come.
    """
    arrived = [_arrivals(span, own, overlaps) for span, own in zip(passes.last, sums, strict=True)]
    ends = [times[-1] if times else span.end_seconds for times, span in zip(arrived, passes.last, strict=True)]
    all_summed = max(passes.seconds, *ends)
    if streams:
        stepped = [
            _step_on_arrival(times, own, span) for times, own, span in zip(arrived, sums, passes.last, strict=True)
        ]
        starts = [min([*times, end]) for times, end in zip(arrived, ends, strict=True)]
        over = max(stepped) + norm_seconds
    else:
        begin = all_summed + norm_seconds
        starts = [begin] * len(sums)
        stepped = [_step_all(begin, own) for own in sums]
        over = max(stepped)
    published = [done + sum(one.publish for one in own) for done, own in zip(stepped, sums, strict=True)]
    seconds = max(over, *published)
    spans = [
        phase_span(stage, name, start, end)
        for stage, span in enumerate(passes.last)
        for name, start, end in (
            (DATA_PARALLEL, span.end_seconds, ends[stage]),
            (OPTIMIZER, starts[stage], published[stage]),
        )
        if end > start
    ]
    timeline = Timeline(passes.timeline.num_stages, (*passes.timeline.spans, *spans))
    phases = {
        PIPELINE: passes.seconds,
        DATA_PARALLEL: all_summed - passes.seconds,
        OPTIMIZER: seconds - all_summed,
    }
    return _Step(seconds, phases, timeline)


def _arrivals(last: Span, sums: Sequence[Sum], overlaps: float) -> list[float]:
    """The moments at which buckets are summed. Beside a task only the part `overlaps` of a collective goes on."""
    times, free = [], last.start_seconds
    for one in sums:
        begin = max(free, last.start_seconds + one.ready)
        beside = min(one.reduce, overlaps * max(0.0, last.end_seconds - begin))
        ended = begin + beside / overlaps if overlaps else begin
        free = ended if beside == one.reduce else max(begin, last.end_seconds) + one.reduce - beside
        times.append(free)
    return times


def _step_all(begin: float, sums: Sequence[Sum]) -> float:
    """The end of an optimizer that steps all buckets; what it fetches for one comes while it steps the one before."""
    first = sums[0].lane / 2 if sums else 0.0
    return begin + first + sum(max(one.steps, one.lane) for one in sums)


def _step_on_arrival(arrivals: Sequence[float], sums: Sequence[Sum], last: Span) -> float:
    """The end of an optimizer that steps each bucket when it has come."""
    now = last.end_seconds
    for arrived, one in zip(arrivals, sums, strict=True):
        now = max(now, arrived) + max(one.steps, one.lane)
    return now
