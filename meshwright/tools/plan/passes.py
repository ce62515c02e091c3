"""The pipeline phase of a step: the pipeline's own engine on the virtual clock, however many microbatches there are.

The middle of a long step repeats itself, so a shorter step is simulated, and what it leaves out is added:

| the shorter step is long enough when                                | and a step of more microbatches takes          |
|---------------------------------------------------------------------|------------------------------------------------|
| all stages do what they did a period before (`_period`)             | more periods, and holds as much                |
| a further microbatch takes as long as the slowest stage works on it | more of that; without a limit it holds more    |

The first is exact: what a stage does hangs on the state of the pipeline alone, and a state that comes back brings all
that followed it. So is the second under GPipe, whose stages do one kind of task at a time: its seconds are the longest
of many sums, each of which grows by the same for each microbatch, so that they never grow faster than by the slowest F
and the slowest B, and once they do they always will. Elsewhere no step can be faster than its slowest stage, and one
that has come to its pace keeps it up to what its first and last microbatches differ by. Tests hold all of it against
whole simulations. Where neither shows in MOST_TASKS tasks, the two longest steps are continued in a line.

The end of a step on the virtual clock: gradients' sums after the pipeline (passes.py), the optimizer, publishing.

Each stage's ranks do the same at the same time, so one of them stands for all. Buckets leave when the last task that
writes them has passed the links of their parameters, and travel one after the other beside what is left of it. The
optimizer begins when all gradients are there and the norm is known; an offloaded one that does not need the norm takes
each bucket as it comes. What owners publish travels under the next step's first forward pass, in whose order it sets
out; a step is as long as from one such pass to the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import lcm

from meshwright.config import Config
from meshwright.parts import placement_of, rule_of
from meshwright.pipeline.clock import Pace, simulate, undisturbed
from meshwright.pipeline.placement import ChunkPlacement
from meshwright.pipeline.schedule import ScheduleRule
from meshwright.pipeline.span import Span, Timeline, phase_span
from meshwright.pipeline.task import Task, TaskKind
from meshwright.tools.plan.memory import Peak
from meshwright.tools.plan.recorder import Cost, PieceCosts, place
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PIPELINE

WHOLE_TASKS = 3_000
"""Up to so many tasks a step is simulated whole."""

MOST_TASKS = 25_000
"""A shorter step of so many tasks is the last that is tried, also where it has not come to repeat itself."""

_ROUND = 12
"""Microbatches that are left out are a multiple of it, so that most periods divide them."""

_TICKS = 2.0**40
"""Ticks of the clock in a second. Sums of whole ticks are exact, so that a state that comes back is equal."""

_ALIKE = 1e-9
"""The difference of two equal times where stages share cores: there a task's pace changes under way."""

TaskCosts = Callable[[int, TaskKind, int], Cost]
"""costs(position, kind, place): of a task at a position of the chain, of a microbatch at a place of the step
(recordings.place)."""
Latency = Callable[[int, int], float]
"""latency(from, to): seconds of a message between neighbouring positions."""
Pieces = Callable[[int, TaskKind, int], PieceCosts]
"""pieces(position, kind, place): the task in pieces, where a position falls into some."""


@dataclass(frozen=True)
class Passes:
    """The pipeline phase: its seconds, each stage's last task, its most memory, and its seconds of tasks. `timeline`:
    of a step of fewer microbatches, where there are many. `chunk_ends`: of each stage, seconds from its last task's
    begin to the last task of each of its chunks; below nothing where that was over before."""

    seconds: float
    timeline: Timeline
    last: tuple[Span, ...]
    peaks: tuple[Peak, ...]
    busy: tuple[float, ...]
    chunk_ends: tuple[Mapping[int, float], ...] = ()

    @property
    def idle_share(self) -> float:
        """The part of the phase in which stages do no task, the mean of all."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0

    def shown(self) -> Passes:
        """The same with no more of its timeline than a picture can show."""
        if len(self.timeline.spans) <= WHOLE_TASKS:
            return self
        return replace(self, timeline=Timeline(len(self.busy), self.timeline.spans[:WHOLE_TASKS]))

    def continued(self, delays: Sequence[float], busy: Sequence[float], peaks: tuple[Peak, ...]) -> Passes:
        """A step that is longer in its middle: each stage's last task comes later by so much."""
        last = tuple(
            span._replace(start_seconds=span.start_seconds + seconds, end_seconds=span.end_seconds + seconds)
            for span, seconds in zip(self.last, delays, strict=True)
        )
        more = tuple(own + added for own, added in zip(self.busy, busy, strict=True))
        return Passes(self.seconds + max(delays), self.timeline, last, peaks, more, self.chunk_ends)


def phase_of(
    config: Config, placement: ChunkPlacement, costs: TaskCosts, latency: Latency, pace: Pace = undisturbed,
    pieces: Pieces | None = None,
) -> PipelinePhase:  # fmt: skip
    """All microbatches of a step. `placement`: of its tasks; `costs`: while all stages are at work; `pace`: how much
    faster fewer of them are."""
    return PipelinePhase(rule_of(config), placement, config.num_microbatches, costs, latency, pace, pieces)


def tasks_of_stages(config: Config, costs: TaskCosts, latency: Latency, some: int) -> list[list[Task]]:
    """Each stage's tasks of a step that has only `some` microbatches, in the order in which they begin; of whole
    chunks."""
    phase = phase_of(config, placement_of(config), costs, latency)
    spans = phase.simulated(some).timeline.spans
    tasks: list[list[Task]] = [[] for _ in range(phase.stages)]
    for span in spans:
        tasks[span.stage].append(Task(TaskKind(span.name[0]), span.microbatch or 0, span.chunk))
    return tasks


class PipelinePhase:
    """A step of `count` microbatches, of which fewer may be simulated."""

    def __init__(
        self,
        rule: ScheduleRule,
        placement: ChunkPlacement,
        count: int,
        costs: TaskCosts,
        latency: Latency,
        pace: Pace,
        pieces: Pieces | None = None,
    ) -> None:
        self.rule, self.placement, self.stages = rule, placement, placement.num_stages
        self.count, self.pace = count, pace
        tasks = sum(len(own) for stage in range(self.stages) for own in placement.pieces_of(stage))
        self.tasks_of_one = tasks * len(rule.kinds)
        self.pieces = None if pieces is None else cache(pieces)
        self.costs = cache(lambda *key: replace(cost := costs(*key), seconds=_ticks(cost.seconds)))
        self.latency = cache(lambda start, end: _ticks(latency(start, end)))
        self.fills = rule.limit_at(0, placement, count) == count * placement.num_chunks

    @property
    def is_long(self) -> bool:
        return self.count * self.tasks_of_one > WHOLE_TASKS

    @cached_property
    def beginning(self) -> Passes:
        """The first microbatches of a long step alone, which hold no more than all."""
        return self.simulated(next(self.lengths())) if self.is_long else self.whole

    @cached_property
    def whole(self) -> Passes:
        """The whole step."""
        if not self.is_long:
            return self.simulated(self.count)
        before: tuple[int, Passes] | None = None
        for some in self.lengths():
            shorter = self.simulated(some) if before else self.beginning
            if some == self.count:
                return shorter.shown()
            # Under GPipe the state never comes back: microbatches pile up between the stages.
            known = None if self.fills else self.repeated(some, shorter)
            if known is None and before is not None and self.is_saturated(some, shorter, *before):
                known = self.line(some, shorter, *before)
            if known is not None:
                return known.shown()
            if before is not None and some * self.tasks_of_one > MOST_TASKS:
                return self.line(some, shorter, *before).shown()
            before = some, shorter
        raise AssertionError("the last length is the whole step")

    def lengths(self) -> Iterator[int]:
        """Numbers of microbatches to simulate: enough to fill the stages and to come to a middle, then ever more.
        Where chunks take turns, rounds of as many microbatches as stages are left out."""
        positions, stages = self.placement.num_positions, self.stages
        some, more = positions + min(positions, 16) + 8, positions // 2 + 8
        left_out = _ROUND if self.placement.num_chunks == 1 else lcm(_ROUND, stages)
        while some < self.count:
            # So that what is left out is whole periods, and the last microbatches keep their places.
            some += (self.count - some) % left_out
            yield some
            some, more = some + more, 2 * more
        yield self.count

    def simulated(self, some: int) -> Passes:
        """Simulate `some` microbatches, whose places are those of a step of `count`."""
        begun: list[list[Cost]] = [[] for _ in range(self.stages)]

        def seconds(stage: int, task: Task) -> float:
            # The last simulated microbatch is the step's last, whose gradients become whole.
            index = task.microbatch if task.microbatch < some - 1 else self.count - 1
            cost = self.cost(stage, task, place(index, self.count))
            begun[stage].append(cost)  # a stage's tasks begin in the order in which the clock asks
            return cost.seconds

        def latency(start: int, end: int, task: Task) -> float:
            chunk, at = self.placement.place(start, task.chunk)
            position = self.placement.position(start, chunk)
            if self.pieces is not None and self.placement.crosses(start, task):
                before = at if task.kind is TaskKind.FORWARD else at - 1
                return _ticks(self.pieces(position, task.kind, 0).trades[before])
            return self.latency(position, position + (1 if task.kind is TaskKind.FORWARD else -1))

        timeline = simulate(self.stages, some, self.rule, seconds, latency, self.pace, self.placement)
        last, busy = [timeline.spans[0]] * self.stages, [0.0] * self.stages
        ends: list[dict[int, float]] = [{} for _ in range(self.stages)]
        for span in timeline.spans:  # in the order in which they begin
            last[span.stage] = span
            ends[span.stage][self.placement.place(span.stage, span.chunk)[0]] = span.end_seconds
            busy[span.stage] += span.seconds
        peaks = []
        for costs in begun:
            live = kept = most = 0
            for cost in costs:
                most = max(most, live + cost.peak_bytes)  # a task's peak stands on what those before it have kept
                live += cost.kept_bytes
                kept = max(kept, live)
            peaks.append(Peak(kept, most))
        chunk_ends = tuple(
            {chunk: end - span.start_seconds for chunk, end in own.items()}
            for own, span in zip(ends, last, strict=True)
        )
        return Passes(timeline.total_seconds, timeline, tuple(last), tuple(peaks), tuple(busy), chunk_ends)

    def repeated(self, some: int, shorter: Passes) -> Passes | None:
        """The whole step, if the shorter one has come to repeat itself before its first stage took its last one in."""
        period = _period(shorter.timeline, exact=self.pace is undisturbed)
        if period is None:
            return None
        microbatches, seconds, busy = period
        # What is left out must be whole periods, so the rest is simulated.
        if rest := (self.count - some) % microbatches:
            shorter = self.simulated(some + rest)
        times = (self.count - some - rest) // microbatches
        return shorter.continued([times * seconds] * self.stages, [times * each for each in busy], shorter.peaks)

    def cost(self, stage: int, task: Task, which: int) -> Cost:
        """The cost of a task of a microbatch at a place of the step: a chunk's, or of one of its pieces."""
        chunk, at = self.placement.place(stage, task.chunk)
        position = self.placement.position(stage, chunk)
        if self.pieces is None:
            return self.costs(position, task.kind, which)
        own = self.pieces(position, task.kind, which).costs[at]
        return replace(own, seconds=_ticks(own.seconds))

    @cached_property
    def slowest(self) -> float:
        """The seconds that the slowest stage works on a microbatch; of each kind of task where they fill."""
        middle = [
            [
                sum(
                    self.cost(stage, Task(kind, 0, at), 1).seconds
                    for own in self.placement.pieces_of(stage)
                    for at in own
                )
                for kind in self.rule.kinds
            ]
            for stage in range(self.stages)
        ]
        return sum(map(max, zip(*middle, strict=True))) if self.fills else max(map(sum, middle))

    def is_saturated(self, some: int, longer: Passes, fewer: int, shorter: Passes) -> bool:
        """Whether a microbatch more takes what the slowest stage works on it."""
        grown = (longer.seconds - shorter.seconds) / (some - fewer)
        return self.pace is undisturbed and abs(grown - self.slowest) <= _ALIKE * self.slowest

    def line(self, some: int, longer: Passes, fewer: int, shorter: Passes) -> Passes:
        """The whole step, as it goes on from two shorter ones, but no faster than its slowest stage."""
        times = (self.count - some) / (some - fewer)

        def beyond(long: float, short: float) -> float:
            return times * (long - short)

        peaks = longer.peaks
        seconds = as_before = beyond(longer.seconds, shorter.seconds)
        if self.pace is undisturbed:
            # No step can be faster than its slowest stage, whatever two lengths that are too short may say.
            seconds = max(seconds, (self.count - some) * self.slowest)
        delays = [seconds] * self.stages
        if self.fills:  # a stage whose backward passes are fast ends before the others, and ever longer before them
            ends = zip(longer.last, shorter.last, strict=True)
            delays = [seconds - as_before + beyond(long.end_seconds, short.end_seconds) for long, short in ends]
            peaks = tuple(
                Peak(
                    long.activation_bytes + round(beyond(long.activation_bytes, short.activation_bytes)),
                    long.total_bytes + round(beyond(long.total_bytes, short.total_bytes)),
                )
                for long, short in zip(longer.peaks, shorter.peaks, strict=True)
            )
        busy = [beyond(*both) for both in zip(longer.busy, shorter.busy, strict=True)]
        return longer.continued(delays, busy, peaks)


def _period(timeline: Timeline, *, exact: bool) -> tuple[int, float, list[float]] | None:
    """The period in which a pipeline repeats itself when its first stage takes in the last microbatch: microbatches,
    seconds, and each stage's seconds of tasks in it.

    The state of the pipeline at a moment is what its stages have begun for microbatches that are not done everywhere.
    It has come back where each such task has begun, and will end, a period after that of as many microbatches before,
    and each stage has begun so many of each kind meanwhile.
    """
    tasks: dict[tuple[int, str, int], list[Span]] = {}
    for span in timeline.spans:  # of a chunk each kind in the order of microbatches
        tasks.setdefault((span.stage, span.name[0], span.chunk), []).append(span)
    taken = tasks[0, str(TaskKind.FORWARD), 0]
    now = taken[-1].start_seconds
    starts = {key: [span.start_seconds for span in spans] for key, spans in tasks.items()}
    begun = {key: bisect_left(times, now) for key, times in starts.items()}
    # All before are done everywhere and act on nothing any more.
    oldest = max(0, min(begun.values()) - 1)
    slack = 0.0 if exact else _ALIKE * now
    for microbatches in range(1, oldest):
        seconds = now - taken[-1 - microbatches].start_seconds
        # Counters first, which fail early and cost a bisection each.
        same = all(
            bisect_left(times, now - seconds - slack) == begun[key] - microbatches for key, times in starts.items()
        ) and all(
            abs(one.start_seconds - before.start_seconds - seconds) <= slack
            and abs(one.end_seconds - before.end_seconds - seconds) <= slack
            for key, spans in tasks.items()
            for one, before in zip(
                spans[oldest : begun[key]], spans[oldest - microbatches : begun[key] - microbatches], strict=True
            )
        )
        if same:
            busy = [0.0] * timeline.num_stages
            for (stage, _, _), spans in tasks.items():
                busy[stage] += sum(span.seconds for span in spans[oldest - microbatches : oldest])
            return microbatches, seconds, busy
    return None


def _ticks(seconds: float) -> float:
    return round(seconds * _TICKS) / _TICKS


@dataclass(frozen=True)
class Sum:
    """A bucket's way: `ready`: seconds of its stage's last task after which it may leave, less than none where an
    earlier task was the last that writes it; `reduce`, `publish`: seconds
    of its collectives; `steps`: of its optimizer step; `lane`: of what must be fetched and written back for it; `read`:
    seconds of its stage's first task after which its new values are read."""

    ready: float
    reduce: float
    publish: float
    steps: float
    lane: float
    read: float = 0.0


@dataclass(frozen=True)
class PlannedStep:
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
) -> PlannedStep:
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
    return PlannedStep(seconds, phases, timeline)


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
    times, free = [], 0.0
    for one in sums:
        begin = max(free, last.start_seconds + one.ready)
        beside = min(one.reduce, overlaps * max(0.0, last.end_seconds - begin))
        # Under computation a collective goes on at the pace `overlaps`, so it takes 1/overlaps as long there.
        ended = begin + beside / overlaps if overlaps else begin
        free = ended if beside == one.reduce else max(begin, last.end_seconds) + one.reduce - beside
        times.append(free)
    return times
