"""The end of a step on the virtual clock: gradients' sums after the pipeline (passes.py), the optimizer, publishing.

Each stage's ranks do the same at the same time, so one of them stands for all. Buckets leave when the last task that
writes them has passed the links of their parameters, and travel one after the other beside what is left of it. The
optimizer begins when all gradients are there and the norm is known; an offloaded one that does not need the norm takes
each bucket as it comes. What owners publish travels under the next step's first forward pass, in whose order it sets
out; a step is as long as from one such pass to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pipeline.span import Span, Timeline, phase_span
from meshwright.tools.plan.passes import Passes
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PIPELINE


@dataclass(frozen=True)
class Sum:
    """A bucket's way: `ready`: seconds of its stage's last task after which it may leave; `reduce`, `publish`: seconds
    of its collectives; `steps`: of its optimizer step; `lane`: of what must be fetched and written back for it; `read`:
    seconds of its stage's first task after which its new values are read."""

    ready: float
    reduce: float
    publish: float
    steps: float
    lane: float
    read: float = 0.0


@dataclass(frozen=True)
class _Step:
    """`phases`: seconds by name (training/phases.py), of the step's longest way through the stages."""

    seconds: float
    phases: dict[str, float]
    timeline: Timeline


def finish(
    passes: Passes,
    sums: Sequence[Sequence[Sum]],
    norm_seconds: float,
    *,
    streams: bool,
    overlaps: float,
    publishes: float,
) -> _Step:
    """The step's end. `sums`: each stage's buckets, in the order in which they leave; `norm_seconds`: of the
    collectives that all ranks join in before the optimizer; `streams`: whether it steps a bucket when it has come;
    `overlaps`, `publishes`: the parts of a sum and of publishing that go on under computation.
    """
    arrived = [_arrivals(span, own, overlaps) for span, own in zip(passes.last, sums, strict=True)]
    ends = [times[-1] if times else span.end_seconds for times, span in zip(arrived, passes.last, strict=True)]
    all_summed = max(passes.seconds, *ends)
    if streams:
        stepped = []
        for times, own, span in zip(arrived, sums, passes.last, strict=True):
            now = span.end_seconds
            for summed, one in zip(times, own, strict=True):
                now = max(now, summed) + max(one.steps, one.lane)
            stepped.append(now)
        starts = [min([*times, end]) for times, end in zip(arrived, ends, strict=True)]
        over = max(stepped) + norm_seconds
    else:
        begin = all_summed + norm_seconds
        starts = [begin] * len(sums)
        # Fetching bucket i + 1 overlaps stepping bucket i; the first fetch, half of a lane, hides under nothing.
        first = [own[0].lane / 2 if own else 0.0 for own in sums]
        stepped = [
            begin + fetch + sum(max(one.steps, one.lane) for one in own) for fetch, own in zip(first, sums, strict=True)
        ]
        over = max(stepped)
    begins = [
        min((span.start_seconds for span in passes.timeline.spans if span.stage == stage), default=0.0)
        for stage in range(len(sums))
    ]
    late = [_wait_for_published(own, begin, publishes) for own, begin in zip(sums, begins, strict=True)]
    seconds = max(over, *(done + waits for done, waits in zip(stepped, late, strict=True)))
    spans = [
        phase_span(stage, name, start, end)
        for stage, span in enumerate(passes.last)
        for name, start, end in (
            (DATA_PARALLEL, span.end_seconds, ends[stage]),
            (OPTIMIZER, starts[stage], stepped[stage]),
        )
        if end > start
    ]
    timeline = Timeline(passes.timeline.num_stages, (*passes.timeline.spans, *spans))
    phases = {
        PIPELINE: passes.seconds + seconds - over,
        DATA_PARALLEL: all_summed - passes.seconds,
        OPTIMIZER: over - all_summed,
    }
    return _Step(seconds, phases, timeline)


def _wait_for_published(sums: Sequence[Sum], begins: float, overlaps: float) -> float:
    """Seconds that a stage's next forward pass waits for published values. `begins`: seconds until it has a task."""
    # Gradients came backward, so the last buckets' values are read first and sent first. A stage whose pass begins
    # later has more time for them.
    wait = sent = 0.0
    for one in reversed(sums):
        sent += one.publish
        wait = max(wait, sent - overlaps * (begins + one.read))
    return wait


def _arrivals(last: Span, sums: Sequence[Sum], overlaps: float) -> list[float]:
    """The moments at which buckets are summed. Beside a task only the part `overlaps` of a collective goes on."""
    times, free = [], last.start_seconds
    for one in sums:
        begin = max(free, last.start_seconds + one.ready)
        beside = min(one.reduce, overlaps * max(0.0, last.end_seconds - begin))
        # Under computation a collective goes on at the pace `overlaps`, so it takes 1/overlaps as long there.
        ended = begin + beside / overlaps if overlaps else begin
        free = ended if beside == one.reduce else max(begin, last.end_seconds) + one.reduce - beside
        times.append(free)
    return times
