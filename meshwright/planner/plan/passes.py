"""The pipeline phase and the end of a step, simulated by the pipeline's engine on a virtual clock for any number of
microbatches.

The middle of a long step is periodic, so a shorter step is simulated and extended:

| the shorter step is long enough if                                  | and each further microbatch adds               |
|---------------------------------------------------------------------|------------------------------------------------|
| the pipeline's state recurs (`_period`)                             | its share of a period, and no memory           |
| one microbatch more takes the slowest stage's seconds               | these seconds; without a limit also memory     |

The first rule is exact: a stage's next task depends on the pipeline's state alone. The second rule is exact under
GPipe, since stages run one kind of task at a time. The seconds of GPipe are a maximum of sums, each with a constant
growth a microbatch, at most the slowest F plus the slowest B. This growth is final once reached. Under other
schedules no step is faster than the slowest stage, and a step at this pace keeps the pace except for its first and last
microbatches. Tests compare both rules with whole simulations. If neither applies within MOST_TASKS tasks, the two
longest steps are extrapolated linearly.

Until the first stage begins the last microbatch of a shorter step, the whole step is the same. Then each stage has at
least the seconds of the rest of its tasks ahead (`PipelinePhase.least_seconds`).

The end of a step: sums of gradients after the pipeline, the optimizer, publishing. All ranks of a stage do the same, so
one is simulated. A bucket is sent once its last task has passed the bucket's layers. Buckets are sent one after
another, during the rest of that task. The optimizer begins after all sums and the norm; an offloaded optimizer without
a norm steps each bucket on arrival. Published weights are sent during the next step's first forward pass, in its order.
A step's seconds are measured from one first forward pass to the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import lcm

from meshwright.config import Config
from meshwright.planner.plan.memory import Peak
from meshwright.planner.plan.recorder import Cost, PieceCosts, place
from meshwright.planner.plan.timing import slowed
from meshwright.strategies.pipeline.clock import Pace, simulate
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import ScheduleRule
from meshwright.strategies.pipeline.span import Span, Timeline
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.strategies.pipeline.task import Task, TaskKind
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PASSES

WHOLE_TASKS = 3_000
"""A step of at most this many tasks is simulated whole."""

MOST_TASKS = 25_000
"""Tasks of the longest shortened step that is simulated before extrapolation."""

_ROUND = 12
"""The number of microbatches left out is a multiple of this, which most periods divide."""

_TICKS = 2.0**40
"""Clock ticks a second. Sums of whole ticks are exact, so that recurring states compare equal."""

_ALIKE = 1e-9
"""Tolerance in seconds for equal times if stages share cores, since the pace changes during a task."""

TaskCosts = Callable[[int, TaskKind, int], Cost]
"""costs(position, kind, place): cost of a task at a position of the chain; `place`: of its microbatch in the step
(recorder.place)."""
Latency = Callable[[int, int], float]
"""latency(from, to): seconds of a message between neighbouring positions."""
Pieces = Callable[[int, TaskKind, int], PieceCosts]
"""pieces(position, kind, place): the task's pieces, at positions that have pieces (pieces.py)."""


@dataclass(frozen=True)
class Passes:
    """The pipeline phase: its seconds, and by stage the last task, peak memory and seconds of tasks."""

    seconds: float
    timeline: Timeline
    """Tasks of a shorter step, if there are many microbatches."""
    last: tuple[Span, ...]
    peaks: tuple[Peak, ...]
    busy: tuple[float, ...]
    chunk_ends: tuple[Mapping[int, float], ...] = ()
    """By stage and chunk, seconds from the begin of the stage's last task to the chunk's last end; negative if earlier.
    """

    @property
    def idle_share(self) -> float:
        """Share of the phase without a task, averaged over stages."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0

    def shown(self) -> Passes:
        """Return these passes with a timeline of at most WHOLE_TASKS tasks, for a picture."""
        if len(self.timeline.spans) <= WHOLE_TASKS:
            return self
        return replace(self, timeline=Timeline(len(self.busy), self.timeline.spans[:WHOLE_TASKS]))

    def continued(self, delays: Sequence[float], busy: Sequence[float], peaks: tuple[Peak, ...]) -> Passes:
        """Return a step with a longer middle, which delays each stage's last task."""
        last = tuple(
            span._replace(start_seconds=span.start_seconds + seconds, end_seconds=span.end_seconds + seconds)
            for span, seconds in zip(self.last, delays, strict=True)
        )
        more = tuple(busy_seconds + added for busy_seconds, added in zip(self.busy, busy, strict=True))
        return Passes(self.seconds + max(delays), self.timeline, last, peaks, more, self.chunk_ends)


def phase_of(
    config: Config, placement: ChunkPlacement, costs: TaskCosts, latency: Latency, pace: Pace | None = None,
    pieces: Pieces | None = None,
) -> PipelinePhase:  # fmt: skip
    """Build the pipeline phase of a step. `costs`: with all stages at work; `pace`: the speed-up of tasks while fewer
    stages work."""
    return PipelinePhase(rule_of(config), placement, config.num_microbatches, costs, latency, pace, pieces)


def tasks_of_stages(config: Config, costs: TaskCosts, latency: Latency, some: int) -> list[list[Task]]:
    """Return each stage's tasks, for whole chunks, ordered by begin, in a step of `some` microbatches."""
    phase = phase_of(config, placement_of(config), costs, latency)
    spans = phase.simulated(some).timeline.spans
    tasks: list[list[Task]] = [[] for _ in range(phase.stages)]
    for span in spans:
        tasks[span.stage].append(Task(TaskKind(span.name[0]), span.microbatch or 0, span.chunk))
    return tasks


class PipelinePhase:
    """A step of `count` microbatches, simulated with fewer if the middle is periodic."""

    def __init__(
        self,
        rule: ScheduleRule,
        placement: ChunkPlacement,
        count: int,
        costs: TaskCosts,
        latency: Latency,
        pace: Pace | None,
        pieces: Pieces | None = None,
    ) -> None:
        self.rule, self.placement, self.stages = rule, placement, placement.num_stages
        self.count, self.pace = count, pace
        tasks = sum(len(numbers) for stage in range(self.stages) for numbers in placement.numbers[stage])
        self.tasks_of_one = tasks * len(rule.kinds)
        self.is_long = count * self.tasks_of_one > WHOLE_TASKS
        self.pieces = None if pieces is None else cache(pieces)
        self.costs = cache(lambda *key: (cost := costs(*key))._replace(seconds=_ticks(cost.seconds)))
        self.latency, self.delay, self.cost = latency, cache(self._delay), cache(self._cost)
        self.fills = rule.limit_at(0, placement, count) == count * placement.num_chunks

    @cached_property
    def beginning(self) -> Passes:
        """The first microbatches of a long step, as a lower bound of its memory."""
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
            # Under GPipe no state recurs, since microbatches accumulate between stages.
            known = None if self.fills else self.repeated(some, shorter)
            if known is None and before is not None and self.pace is None:
                grown = (shorter.seconds - before[1].seconds) / (some - before[0])
                if abs(grown - self.slowest) <= _ALIKE * self.slowest:
                    known = self.line(some, shorter, *before)
            if known is not None:
                return known.shown()
            if before is not None and some * self.tasks_of_one > MOST_TASKS:
                return self.line(some, shorter, *before).shown()
            before = some, shorter
        raise AssertionError("the last length is the whole step")

    def lengths(self) -> Iterator[int]:
        """Yield numbers of microbatches to simulate, ascending; the first fills all stages. With chunks, the number
        left out is a multiple of the number of stages."""
        positions, stages = self.placement.num_positions, self.stages
        some, more = positions + min(positions, 16) + 8, positions // 2 + 8
        left_out = _ROUND if self.placement.num_chunks == 1 else lcm(_ROUND, stages)
        while some < self.count:
            # Whole periods are left out, so the places of the last microbatches stay.
            some += (self.count - some) % left_out
            yield some
            some, more = some + more, 2 * more
        yield self.count

    def simulated(self, some: int) -> Passes:
        """Simulate a step of `some` microbatches, with the places of a step of `count`."""
        begun: list[list[Cost]] = [[] for _ in range(self.stages)]

        # The last simulated microbatch is the step's last, which completes gradients.
        places = [place(index, self.count) for index in (*range(some - 1), self.count - 1)]

        def seconds(stage: int, task: Task) -> float:
            cost = self.cost(stage, task.kind, task.chunk, places[task.microbatch])
            begun[stage].append(cost)  # the clock asks in the order in which a stage's tasks begin
            return cost.seconds

        def latency(start: int, end: int, task: Task) -> float:
            return self.delay(start, task.kind, task.chunk)

        timeline = simulate(self.stages, some, self.rule, seconds, latency, self.pace, self.placement)
        last, busy = [timeline.spans[0]] * self.stages, [0.0] * self.stages
        ends: list[dict[int, float]] = [{} for _ in range(self.stages)]
        for span in timeline.spans:  # ordered by begin
            last[span.stage] = span
            ends[span.stage][self.placement.places[span.stage][span.chunk][0]] = span.end_seconds
            busy[span.stage] += span.seconds
        peaks = []
        for costs in begun:
            live = most_kept = most = host = most_host = 0
            for cost in costs:
                most = max(most, live + cost.peak_bytes)  # a task's peak is added to the bytes kept by earlier tasks
                live += cost.kept_bytes
                most_kept = max(most_kept, live)
                host += cost.host_bytes
                most_host = max(most_host, host)
            peaks.append(Peak(most_kept, most, most_host))
        chunk_ends = tuple(
            {chunk: end - span.start_seconds for chunk, end in stage_ends.items()}
            for stage_ends, span in zip(ends, last, strict=True)
        )
        return Passes(timeline.total_seconds, timeline, tuple(last), tuple(peaks), tuple(busy), chunk_ends)

    def repeated(self, some: int, shorter: Passes) -> Passes | None:
        """Extend a shorter step to the whole step, if a period is found before the first stage begins its last
        microbatch."""
        period = _period(shorter.timeline, exact=self.pace is None)
        if period is None:
            return None
        microbatches, seconds, busy = period
        # Whole periods are left out; the remainder is simulated.
        if rest := (self.count - some) % microbatches:
            shorter = self.simulated(some + rest)
        times = (self.count - some - rest) // microbatches
        return shorter.continued([times * seconds] * self.stages, [times * each for each in busy], shorter.peaks)

    def _cost(self, stage: int, task_kind: TaskKind, task_chunk: int, which: int) -> Cost:
        """Return the cost of a stage's task, or of one piece of a task; `which`: the microbatch's place."""
        chunk, at = self.placement.places[stage][task_chunk]
        position = self.placement.positions[stage][chunk]
        if self.pieces is None:
            return self.costs(position, task_kind, which)
        cost = self.pieces(position, task_kind, which).costs[at]
        return cost._replace(seconds=_ticks(cost.seconds))

    def _delay(self, stage: int, task_kind: TaskKind, task_chunk: int) -> float:
        """Return the seconds of the message after a stage's task, or after one piece of a task."""
        chunk, at = self.placement.places[stage][task_chunk]
        position, forward = self.placement.positions[stage][chunk], task_kind is TaskKind.FORWARD
        if self.pieces is not None and self.placement.crosses(stage, Task(task_kind, 0, task_chunk)):
            return _ticks(self.pieces(position, task_kind, 0).trades[at if forward else at - 1])
        return _ticks(self.latency(position, position + (1 if forward else -1)))

    def least_seconds(self) -> float:
        """Return a lower bound of the whole step's seconds from its beginning alone; 0 if the bound would save little:
        under a fixed order, and for few microbatches."""
        useful = self.is_long and self.pace is None and not self.rule.fixed
        return self.least_from(self.beginning) if useful else 0.0

    def least_from(self, shorter: Passes) -> float:
        """Return a lower bound of the whole step's seconds from a shorter step, on devices of each stage's own."""
        spans, least, after = shorter.timeline.spans, 0.0, 0.0
        begun = [span for span in spans if (span.stage, span.chunk, span.name[0]) == (0, 0, TaskKind.FORWARD)]
        now, more = begun[-1].start_seconds, self.count - len(begun)
        left = [busy + more * sum(each) for busy, each in zip(shorter.busy, self.middle, strict=True)]
        for span in spans:
            left[span.stage] -= max(0.0, min(span.end_seconds, now) - span.start_seconds)
        for stage, seconds in enumerate(left):
            least = max(least, now + seconds + after)
            # After a stage's last B the gradient still passes the stages ahead. W may be a stage's last task.
            if not self.rule.splits:
                after += self.cost(stage, TaskKind.BACKWARD, 0, place(self.count - 1, self.count)).seconds
        return least

    @cached_property
    def middle(self) -> list[list[float]]:
        """By stage and kind, seconds of a microbatch other than the first and the last."""
        return [
            [
                sum(
                    self.cost(stage, task_kind, at, 1).seconds
                    for numbers in self.placement.numbers[stage]
                    for at in numbers
                )
                for task_kind in self.rule.kinds
            ]
            for stage in range(self.stages)
        ]

    @cached_property
    def slowest(self) -> float:
        """Seconds of a microbatch in the slowest stage; under GPipe the slowest F plus the slowest B."""
        return sum(map(max, zip(*self.middle, strict=True))) if self.fills else max(map(sum, self.middle))

    def line(self, some: int, longer: Passes, fewer: int, shorter: Passes) -> Passes:
        """Extrapolate the whole step linearly from two shorter steps, at least at the slowest stage's pace."""
        times = (self.count - some) / (some - fewer)

        def beyond(long: float, short: float) -> float:
            return times * (long - short)

        peaks = longer.peaks
        seconds = as_before = beyond(longer.seconds, shorter.seconds)
        if self.pace is None:
            # Two steps that are too short may have a pace below the slowest stage's.
            seconds = max(seconds, (self.count - some) * self.slowest)
            if not self.rule.fixed:  # rounds of a fixed order may change with the number of microbatches
                seconds = max(seconds, self.least_from(longer) - longer.seconds)
        delays = [seconds] * self.stages
        if self.fills:  # a stage with fast backward passes ends earlier, by a growing margin
            ends = zip(longer.last, shorter.last, strict=True)
            delays = [seconds - as_before + beyond(long.end_seconds, short.end_seconds) for long, short in ends]
            peaks = tuple(
                Peak(
                    long.activation_bytes + round(beyond(long.activation_bytes, short.activation_bytes)),
                    long.total_bytes + round(beyond(long.total_bytes, short.total_bytes)),
                    long.host_bytes + round(beyond(long.host_bytes, short.host_bytes)),
                )
                for long, short in zip(longer.peaks, shorter.peaks, strict=True)
            )
        busy = [beyond(*both) for both in zip(longer.busy, shorter.busy, strict=True)]
        return longer.continued(delays, busy, peaks)


def _period(timeline: Timeline, *, exact: bool) -> tuple[int, float, list[float]] | None:
    """Return the pipeline's period when its first stage begins the last microbatch: (microbatches, seconds, each
    stage's seconds of tasks), or None.

    The state is the set of tasks begun for microbatches that are not finished in all stages. The state recurs with a
    period of n microbatches if each of these tasks began and ended one period after the same task n microbatches
    before, and each stage began n tasks of each kind in between.
    """
    tasks: dict[tuple[int, str, int], list[Span]] = {}
    for span in timeline.spans:  # a chunk's tasks of one kind are in the order of microbatches
        tasks.setdefault((span.stage, span.name[0], span.chunk), []).append(span)
    taken = tasks[0, str(TaskKind.FORWARD), 0]
    now = taken[-1].start_seconds
    starts = {key: [span.start_seconds for span in spans] for key, spans in tasks.items()}
    begun = {key: bisect_left(times, now) for key, times in starts.items()}
    # Microbatches before `oldest` are finished in all stages.
    oldest = max(0, min(begun.values()) - 1)
    slack = 0.0 if exact else _ALIKE * now
    for microbatches in range(1, oldest):
        seconds = now - taken[-1 - microbatches].start_seconds
        # Counts are compared first, since most fail at one bisection each.
        same = all(
            bisect_left(times, now - seconds - slack) == begun[key] - microbatches for key, times in starts.items()
        ) and all(
            abs(span.start_seconds - before.start_seconds - seconds) <= slack
            and abs(span.end_seconds - before.end_seconds - seconds) <= slack
            for key, spans in tasks.items()
            for span, before in zip(
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
    """A bucket's timing in seconds."""

    ready: float
    """From the begin of its stage's last task until the bucket may be sent; negative if an earlier task writes it last.
    """
    reduce: float
    """Seconds of the sum."""
    publish: float
    """Seconds of publishing."""
    steps: float
    """Seconds of the optimizer step."""
    lane: float
    """Seconds of fetching and writing back offloaded states."""
    read: float = 0.0
    """From the begin of its stage's first task to the first read of the weights."""


@dataclass(frozen=True)
class PlannedStep:
    """`phases`: seconds by name (training/phases.py), along the step's critical path."""

    seconds: float
    phases: dict[str, float]
    timeline: Timeline


def finish(
    passes: Passes, sums: Sequence[Sequence[Sum]], norm_seconds: float, *, streams: bool, overlaps: float,
    publishes: float, tax: float = 0.0,
) -> PlannedStep:  # fmt: skip
    """Time the step's end. `sums`: each stage's buckets in the order of sending.

    Args:
        norm_seconds: Seconds of the norm's collectives.
        streams: Whether the optimizer steps each bucket on arrival.
        overlaps, publishes: The pace of a sum and of publishing during computation, 0 to 1.
        tax: The share by which kernels take longer during a collective."""
    arrived = [_arrivals(span, buckets, overlaps) for span, buckets in zip(passes.last, sums, strict=True)]
    ends = [_end(span, buckets, times, tax) for span, buckets, times in zip(passes.last, sums, arrived, strict=True)]
    all_summed = max(passes.seconds, *ends)
    if streams:
        stepped = []
        for times, buckets, span in zip(arrived, sums, passes.last, strict=True):
            now = span.end_seconds
            for summed, bucket in zip(times, buckets, strict=True):
                now = max(now, summed) + max(bucket.steps, bucket.lane)
            stepped.append(now)
        starts = [min([*times, end]) for times, end in zip(arrived, ends, strict=True)]
        over = max(stepped) + norm_seconds
    else:
        begin = all_summed + norm_seconds
        starts = [begin] * len(sums)
        # Fetching bucket i + 1 overlaps stepping bucket i; nothing hides the first fetch, half of its lane.
        first = [buckets[0].lane / 2 if buckets else 0.0 for buckets in sums]
        stepped = [
            begin + fetch + sum(max(bucket.steps, bucket.lane) for bucket in buckets)
            for fetch, buckets in zip(first, sums, strict=True)
        ]
        over = max(stepped)
    begins = [
        min((span.start_seconds for span in passes.timeline.spans if span.stage == stage), default=0.0)
        for stage in range(len(sums))
    ]
    late = [_wait_for_published(buckets, begin, publishes, tax) for buckets, begin in zip(sums, begins, strict=True)]
    seconds = max(over, *(done + waits for done, waits in zip(stepped, late, strict=True)))
    spans = [
        Span(stage, name, name, start, end)
        for stage, span in enumerate(passes.last)
        for name, start, end in (
            (DATA_PARALLEL, span.end_seconds, ends[stage]),
            (OPTIMIZER, starts[stage], stepped[stage]),
        )
        if end > start
    ]
    timeline = Timeline(passes.timeline.num_stages, (*passes.timeline.spans, *spans))
    phases = {
        PASSES: passes.seconds + seconds - over,
        DATA_PARALLEL: all_summed - passes.seconds,
        OPTIMIZER: over - all_summed,
    }
    return PlannedStep(seconds, phases, timeline)


def _wait_for_published(sums: Sequence[Sum], begins: float, overlaps: float, tax: float) -> float:
    """Return the seconds that published weights add to a stage's next forward pass: waits, and slower kernels.
    `begins`: seconds until the stage's first task."""
    # The last buckets hold the first layers, which are read first and therefore sent first.
    wait = sent = 0.0
    for bucket in reversed(sums):
        sent += bucket.publish
        wait = max(wait, sent - overlaps * (begins + bucket.read))
    return wait + slowed(sent - wait if overlaps else 0.0, tax)


def _arrivals(last: Span, sums: Sequence[Sum], overlaps: float) -> list[float]:
    """Return the ends of the buckets' sums, in seconds. During a task a collective runs at the pace `overlaps`."""
    times, free = [], 0.0
    for bucket in sums:
        begin = max(free, last.start_seconds + bucket.ready)
        beside = min(bucket.reduce, overlaps * max(0.0, last.end_seconds - begin))
        ended = begin + beside / overlaps if overlaps else begin
        free = ended if beside == bucket.reduce else max(begin, last.end_seconds) + bucket.reduce - beside
        times.append(free)
    return times


def _end(last: Span, sums: Sequence[Sum], times: Sequence[float], tax: float) -> float:
    """Return the moment at which a stage's gradients are summed. Sums during its last task delay the task's end.

    Args:
        last: The stage's last task.
        sums: The stage's buckets.
        times: The ends of the buckets' sums (`_arrivals`).
        tax: The share by which kernels take longer during a sum.
    """
    end = times[-1] if times else last.end_seconds
    hidden = sum(bucket.reduce for bucket in sums) - max(0.0, end - last.end_seconds)
    return end + slowed(max(0.0, hidden), tax)
