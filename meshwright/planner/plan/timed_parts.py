"""A chain's distinct parts for a microbatch of any size, interpolated from recordings at two sizes, for estimates.

Kernels and payloads are interpolated linearly, within and beyond the two sizes (recorder.py). Where a part's events
differ between the two (the head's, with its chunks of logits), only its seconds are.

HeldActivations: bytes of activations that a layout holds, of microbatches in flight and of recomputed layers whose
weight gradients wait.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.compute.model import Chunk
from meshwright.compute.parameters.role import HIDDEN_MATRIX
from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.memory import Parameter
from meshwright.planner.plan.recorder import Kernel, Program, between, interpolated_program
from meshwright.planner.plan.recordings import Forms, Recording, bytes_of
from meshwright.ranks.mailbox import AHEAD
from meshwright.strategies.memory.offload import SINGLE
from meshwright.strategies.memory.section import FIELD, keeping_all
from meshwright.strategies.pipeline.partition import ranges_of
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.strategies.pipeline.task import TaskKind

if TYPE_CHECKING:
    from meshwright.planner.plan.predict import Planner

_SIZES = 2, 4
"""Samples of the two recordings, in multiples of the smallest microbatch that the tensor section can cut."""


_Mix = tuple[tuple[float, Program], ...]
"""(factor, program) whose seconds add up: one program, or the two recorded ones with factors, where their events differ
in kind or number (a head's slices, of which the last is a rest)."""


@dataclass(frozen=True)
class EstimatedPart:
    """The embeddings, a layer, or the head, for one size of microbatch: programs, bytes kept by a forward pass, bytes
    sent to the next part, and parameters."""

    programs: dict[TaskKind, tuple[_Mix, ...]]
    kept_bytes: float
    outgoing_bytes: int
    parameters: tuple[Parameter, ...]
    is_layer: bool


@dataclass(frozen=True)
class TimedPart:
    """A part's seconds forward and backward; `inputs`, `weights`: of the two halves of a split backward pass."""

    part: EstimatedPart
    forward: float
    backward: float
    inputs: float
    weights: float


@dataclass
class TimedParts:
    """The parts for layouts on one cluster. Caches what layouts share."""

    planner: Planner
    _parts: dict[Hashable, dict[int, EstimatedPart]] = field(default_factory=dict)
    _timed: dict[Hashable, dict[int, TimedPart]] = field(default_factory=dict)
    _kept_shares: dict[Hashable, float] = field(default_factory=dict)
    _attention_again: dict[Hashable, float] = field(default_factory=dict)

    def distinct(self, config: Config) -> Iterator[tuple[int, Chunk]]:
        """The chain's distinct parts by position, in the order of the forward pass."""
        yield -1, Chunk(range(0), True, False)
        for first in dict.fromkeys(self.planner.recordings.outline(config).alike):
            yield first, Chunk(range(first, first + 1), False, False)
        yield config.model.num_blocks, Chunk(range(0), False, True)

    def of(self, config: Config) -> dict[int, TimedPart]:
        """By position: -1 the embeddings, i the first of each run of equal layers, num_blocks the head."""
        key = config.layout.layer, config.micro, strides(config), config.widens_gradients
        if key not in self._timed:
            self._timed[key] = {place: self._time(config, part) for place, part in self.untimed(config).items()}
        return self._timed[key]

    def _time(self, config: Config, part: EstimatedPart) -> TimedPart:
        """The part's seconds at its quickest place in the step. Half of a backward pass's kernels count for weights,
        with the widening of a layer's gradients, which a recording of one microbatch lacks."""
        timer, network = self.planner.timer(config), self.planner.network(config)
        overlaps = network.overlaps if "layers" in self.planner.software.overlapped else 0.0

        def seconds(mix: _Mix, overlaps: float) -> float:
            return max(0.0, sum(times * timer.seconds(program, network, overlaps) for times, program in mix))

        forward, backward = (
            # Most microbatches neither gather (the first) nor sum (the last): the quickest place.
            min((seconds(mix, overlaps), place) for place, mix in enumerate(part.programs[kind]))
            for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        )
        mix = part.programs[TaskKind.BACKWARD][backward[1]]
        # A linear's backward pass has two products of equal flops: the input's gradient and, if it is trained, the
        # weight's.
        matrices = [each for each in part.parameters if each.spec.role.name == HIDDEN_MATRIX.name]
        trained = sum(each.num_elements for each in matrices if each.spec.role.rule.trained)
        share = trained / whole if (whole := sum(each.num_elements for each in matrices)) else 1.0
        weights = sum(times * timer.computing(program) for times, program in mix) * share / (1 + share)
        inputs, widened = seconds(mix, 0.0) - weights, 0.0
        if config.widens_gradients and part.is_layer:
            learning = [each for each in part.parameters if each.spec.role.rule.trained]
            elements = sum(each.num_elements for each in learning)
            # Reads the gradient, reads and writes the sum.
            touched = sum(each.weight_bytes for each in learning) + 2 * SINGLE * elements
            widened = timer.kernel_seconds(Kernel("element", 0.0, touched, elements, "float32"))
        each = forward[0], backward[0] + widened, inputs, weights + widened
        return TimedPart(part, *(timer.part + seconds for seconds in each))

    def untimed(self, config: Config) -> dict[int, EstimatedPart]:
        """The parts without seconds, equal in every order of axes."""
        key = config.layout.layer, config.micro
        if key not in self._parts:
            smallest = smallest_micro(config)
            by_size = config.layout.tensor.by_size  # what stays, what travels: recorded at each size
            sizes = (config.micro,) * 2 if by_size else tuple(size * smallest for size in _SIZES)
            share = (config.micro / smallest - _SIZES[0]) / (_SIZES[1] - _SIZES[0])
            ends, parts = (-1, config.model.num_blocks), {}
            before: tuple[Forms, Forms] = (), ()
            small, large = (_alone(config, size) for size in sizes)
            for place, chunk in self.distinct(config):
                # A part's input is the output of the part before, at the same size of microbatch.
                one, other = (
                    self.planner.recordings.of(alone, chunk, forms)
                    for alone, forms in zip((small, large), before, strict=True)
                )
                before = one.outgoing, other.outgoing
                parts[place] = _interpolated(one, other, share, is_layer=place not in ends)
            self._parts[key] = parts
        return self._parts[key]

    def kept_share(self, config: Config) -> float:
        """The share of the first layer's kept bytes that remains where attention is recomputed."""
        key = config.layout.layer, config.memory.recompute
        if key not in self._kept_shares:
            kept, still = (_kept(recording) for recording in self._with_attention_again(config))
            # One layer stands for all, which are cut alike.
            self._kept_shares[key] = still / kept
        return self._kept_shares[key]

    def attention_again(self, config: Config) -> float:
        """Seconds that recomputed attention adds to the first layer's backward pass."""
        key = config.layout.layer, config.memory.recompute, config.micro, strides(config)
        if key not in self._attention_again:
            timer, network = self.planner.timer(config), self.planner.network(config)
            once, twice = (
                timer.seconds(recording.programs[TaskKind.BACKWARD][-1], network, 1.0)
                for recording in self._with_attention_again(config)
            )
            # In proportion to the samples; attention grows at least as fast, except for kernel launches.
            share = config.micro / (_SIZES[0] * smallest_micro(config))
            self._attention_again[key] = max(0.0, twice - once) * share
        return self._attention_again[key]

    def _with_attention_again(self, config: Config) -> tuple[Recording, Recording]:
        """Recordings of the first layer for a small microbatch: (without, with) recomputed attention."""
        alone = _alone(config, _SIZES[0] * smallest_micro(config))
        again = with_field(alone, FIELD, config.memory.recompute)
        recordings = self.planner.recordings
        forms = recordings.of(alone, Chunk(range(0), True, False), ()).outgoing
        once, twice = (recordings.of(one, Chunk(range(1), False, False), forms) for one in (alone, again))
        return once, twice


def strides(config: Config, *more: str) -> Hashable:
    """Strides of the axes that cut a layer, and of `more`; they determine the links between these ranks."""
    axes, names = config.layout.nesting, {*(name for name, _ in config.layout.layer_axes), *more}
    return tuple(
        (name, size, math.prod(after for _, after in axes[index + 1 :]))
        for index, (name, size) in enumerate(axes)
        if name in names
    )


def smallest_micro(config: Config) -> int:
    """Least samples of a microbatch with which every rank has one."""
    sizes = dict(config.layout.axes)
    return math.prod(sizes[axis] for axis in config.layout.tensor.batch_axes)


def _alone(config: Config, micro: int) -> Config:
    """One replica of one stage, with few microbatches of `micro` samples a step."""
    one = {
        "data": config.layout.data.model_copy(update={"size": 1, "shard": None}),
        "pipeline": config.layout.pipeline.model_copy(update={"size": 1}),
    }
    count = 2 if config.layout.tensor.by_size else 1  # the first microbatch gathers weights
    batch = config.batch.model_copy(update={"global_": count * micro, "micro": micro})
    memory = keeping_all(config).memory
    # Recordings are made before memory.summa is decided.
    if memory.summa == "auto":
        memory = memory.model_copy(update={"summa": "gather"})
    return config.model_copy(update={"layout": config.layout.model_copy(update=one), "batch": batch, "memory": memory})


def _kept(recording: Recording) -> int:
    """Bytes kept by the recording's forward pass."""
    return recording.programs[TaskKind.FORWARD][-1].kept_bytes


def _interpolated(small: Recording, large: Recording, share: float, *, is_layer: bool) -> EstimatedPart:
    """A part for a microbatch at `share` of the way from the small recording's to the large one's, or beyond."""

    programs = {
        kind: tuple(
            _mixed(one, other, share) for one, other in zip(small.programs[kind], large.programs[kind], strict=True)
        )
        for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    }
    outgoing = [bytes_of(recording.outgoing) for recording in (small, large)]
    # A recording has the schedule of the first layout that asked; facts of the schedule are left out here.
    parameters = tuple(Parameter(each.name, each.shape, each.dtype, each.spec) for each in small.parameters)
    kept = between(_kept(small), _kept(large), share)
    return EstimatedPart(programs, kept, round(between(outgoing[0], outgoing[1], share)), parameters, is_layer)


def _mixed(small: Program, large: Program, share: float) -> _Mix:
    """The program at `share` of the way from the small to the large one, or both with factors. Below the small one: the
    small one in proportion to samples, since a head of few rows has other slices."""
    program = interpolated_program(small, large, share)
    if program.events or not small.events:
        return ((1.0, program),)
    # The events differ (a GPU's head has more slices at the larger size): only seconds are interpolated.
    first, second = _SIZES
    return ((1 - share, small), (share, large)) if share >= 0 else ((1 + share * (second - first) / first, small),)


MIN_DEFERRED_SHARE = 0.5
"""Lower bound of the activations of deferred weight gradients, as a share of the estimate: which stage defers how many
W is uncertain."""

StageShape = tuple[tuple[int, int], ...]
"""A stage as (position of the distinct part, number of such parts)."""


@dataclass
class HeldActivations:
    """Bytes of activations by layout. Caches what layouts share."""

    parts: TimedParts
    _deferrals: dict[Hashable, dict[int, float]] = field(default_factory=dict)
    _known: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def of(self, config: Config, partition: tuple[int, ...], shapes: Sequence[StageShape]) -> tuple[float, float]:
        """(Bytes that the fullest stage keeps, its peak bytes of all microbatches), independent of sync and states."""
        layout = config.layout
        key = (
            layout.layer, layout.pipeline, partition, config.micro, config.num_microbatches, config.memory.recompute,
            layout.data.in_pieces,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._find(config, partition, shapes)
        return self._known[key]

    def _find(self, config: Config, partition: tuple[int, ...], shapes: Sequence[StageShape]) -> tuple[float, float]:
        parts, placement = self.parts.untimed(config), placement_of(config)
        kept, total, deferring = 0.0, 0.0, self._deferring(config, partition, placement)
        # Candidates for the fullest: the first (most microbatches), the longest (most layers), deferring ones (most W).
        for stage in {0, placement.stage_of[partition.index(max(partition))], *deferring}:
            own = placement.positions[stage]
            works = [[(parts[place], times) for place, times in shapes[position]] for position in own]
            in_flight = _in_flight(config, stage, placement)
            keeps = in_flight * sum(self._kept_bytes(config, work) for work in works) / placement.num_chunks
            if stage in deferring:
                whole = sum(times * part.kept_bytes for work in works for part, times in work if part.is_layer)
                limit = rule_of(config).limit_at(stage, placement, config.num_microbatches)
                most = min(limit, config.num_microbatches * placement.num_chunks)
                deferred = max(0, most - in_flight) * deferring[stage] * whole / placement.num_chunks
                keeps += MIN_DEFERRED_SHARE * deferred
            # Messages from both sides have memory before they arrive (mailbox.py).
            ahead = min(AHEAD[self.parts.planner.cluster.device.kind], config.num_microbatches)
            beside = max(
                ahead
                * (
                    (parts[shapes[at - 1][-1][0]].outgoing_bytes if at else 0)
                    + (parts[shapes[at][-1][0]].outgoing_bytes if at < len(shapes) - 1 else 0)
                )
                for at in own
            )
            # At the begin of its backward pass a recomputed group holds all of its activations.
            recomputed = 0.0
            for work in works if config.memory.policy.by_groups else ():
                layers = [(part.kept_bytes, times) for part, times in work if part.is_layer]
                if layers:
                    group = config.memory.policy.group_size(config, sum(times for _, times in layers))
                    recomputed = max(recomputed, group * min(size for size, _ in layers))
            kept = max(kept, keeps)
            total = max(total, keeps + beside + recomputed)
        return kept, total

    def _deferring(self, config: Config, partition: tuple[int, ...], placement: ChunkPlacement) -> dict[int, float]:
        """By stage, the share of microbatches whose W of recomputed layers waits for the in-flight limit. A stage takes
        microbatches at the slowest stage's pace without W, and its remaining time is too short for all W. Of stages
        that hold as much, the last, which has the fewest gradients on their way."""
        rule, in_groups = rule_of(config), config.memory.policy.by_groups
        if rule.fixed or config.layout.pipeline.limit_by_memory or not (rule.splits and in_groups):
            return {}
        key = partition, placement, config.micro, config.num_microbatches
        if key not in self._deferrals:
            costs = self.parts.planner.work(config)
            layers = [sum(costs.layers[layer] for layer in layers) for layers in ranges_of(partition)]
            ends = [0.0] * len(layers)
            ends[0] += costs.embedding
            ends[-1] += costs.head
            own = [placement.positions[stage] for stage in range(placement.num_stages)]
            # A recomputed layer's F, second F, B and W take equal seconds; embeddings and head have one F.
            weights = [sum(layers[at] + ends[at] for at in positions) / 3 for positions in own]
            passes = [sum(layers[at] + ends[at] * 2 / 3 for at in positions) for positions in own]
            alike = {tuple(partition[at] for at in positions): stage for stage, positions in enumerate(own)}
            self._deferrals[key] = {
                stage: max(0.0, 1 - (max(passes) - passes[stage]) / weights[stage])
                for stage in alike.values()
                if weights[stage]
            }
        return self._deferrals[key]

    def _kept_bytes(self, config: Config, stage: Sequence[tuple[EstimatedPart, int]]) -> float:
        """Bytes that a forward pass keeps on a stage; a recomputed group keeps its input."""
        policy = config.memory.policy
        if not policy.recomputes:
            return sum(times * part.kept_bytes for part, times in stage)
        layers = [(part, times) for part, times in stage if part.is_layer]
        kept = sum(times * part.kept_bytes for part, times in layers)
        if policy.attention:
            return self.parts.kept_share(config) * kept
        num_layers = sum(times for _, times in layers)
        wrapped = policy.wrapped_layers(config, num_layers) / max(1, num_layers)
        inputs = sum(times * part.outgoing_bytes for part, times in layers)
        # A CPU's memory is the host's, too.
        here = policy.keeps_inputs or self.parts.planner.cluster.device.kind == "cpu"
        return (1 - wrapped) * kept + here * wrapped * inputs / max(1, policy.group_size(config, num_layers))


def _in_flight(config: Config, stage: int, placement: ChunkPlacement) -> int:
    """Microbatches in flight at a stage's first backward task, counted once for each chunk; message-driven: the likely
    number."""
    if config.layout.pipeline.limit_by_memory:
        return 1  # what memory allows
    count, rule = config.num_microbatches, rule_of(config)
    limit = min(rule.limit_at(stage, placement, count), count * placement.num_chunks)
    return limit if rule.fixed else rule.held(stage, placement.num_stages, limit)
