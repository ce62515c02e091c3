"""Distinct parts of a chain for a microbatch of any size, interpolated from recordings at two sizes, for estimates.

Kernels and payloads are interpolated linearly, within and beyond the two sizes (recorder.py). If a part's events differ
between the two sizes (the head's, with chunks of logits), only seconds are interpolated.

HeldActivations: bytes of activations that a layout holds, for microbatches in flight and for recomputed layers with
deferred weight gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from meshwright.compute.model import Chunk
from meshwright.compute.parameters.role import HIDDEN_MATRIX
from meshwright.config import Config
from meshwright.config.layout import ContextParallel, DataParallel, PipelineSection
from meshwright.config.section import with_field
from meshwright.planner.plan.memory import HeldStage, Parameter
from meshwright.planner.plan.recorder import BATCHED, SOFTMAXES, Kernel, Program, between, interpolated_program
from meshwright.planner.plan.recordings import Recording, bytes_of
from meshwright.planner.plan.remembered import PARTS, remembered
from meshwright.ranks.mailbox import AHEAD
from meshwright.strategies.memory.offload import SINGLE
from meshwright.strategies.memory.section import FIELD, keeping_all
from meshwright.strategies.pipeline.partition import ranges_of
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.strategies.pipeline.task import TaskKind

if TYPE_CHECKING:
    from meshwright.planner.plan.predict import Planner
    from meshwright.planner.plan.site import Links

P = TypeVar("P")

_SIZES = 2, 4
"""Samples of the two recordings, in multiples of the smallest microbatch that the tensor section can cut."""


_Mix = tuple[tuple[float, Program], ...]
"""(factor, program), to be summed in seconds: one program, or both recorded ones with factors if their events differ in
kind or number (a head's slices; the last slice is a remainder)."""


@dataclass(frozen=True)
class EstimatedPart:
    """The embeddings, a layer, or the head, for one size of microbatch: programs, bytes kept by a forward pass, bytes
    of temporaries beside these at a pass's fullest moment, bytes sent to the next part, and parameters."""

    programs: dict[TaskKind, tuple[_Mix, ...]]
    kept_bytes: float
    passing_bytes: float
    outgoing_bytes: int
    parameters: tuple[Parameter, ...]
    is_layer: bool


@dataclass(frozen=True)
class TimedPart:
    """A part's seconds forward and backward; `inputs`, `weights`: seconds of the halves of a split backward pass."""

    part: EstimatedPart
    forward: float
    backward: float
    inputs: float
    weights: float


class Lazily(dict[int, P]):
    """Parts by position, each made at the first read: a bound of the layers alone records no head."""

    def __init__(self, make: Callable[[int], P]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, position: int) -> P:
        self[position] = made = self._make(position)
        return made


StageShape = tuple[tuple[int, int], ...]
"""A stage as (position of the distinct part, number of such parts)."""


@dataclass
class TimedParts:
    """Parts for layouts on one cluster."""

    planner: Planner

    @remembered("model", "data", "loss", "precision.products")
    def distinct(self, config: Config) -> dict[int, Chunk]:
        """Return the chain's distinct parts by position, in the order of the forward pass."""
        chunks = {-1: Chunk(range(0), True, False)}
        for first in dict.fromkeys(self.planner.recordings.outline(config).alike):
            chunks[first] = Chunk(range(first, first + 1), False, False)
        chunks[config.model.num_blocks] = Chunk(range(0), False, True)
        return chunks

    def layers(self, config: Config) -> list[int]:
        """Return the positions of the distinct layers, in the order of the forward pass."""
        return [position for position, chunk in self.distinct(config).items() if chunk.layers]

    @remembered("model", "data", "loss", "precision.products")
    def shapes(self, config: Config, partition: tuple[int, ...]) -> list[StageShape]:
        """Return, by position of the chain, (distinct part, number of such parts)."""
        alike, last = self.planner.recordings.outline(config).alike, len(partition) - 1
        shapes = []
        for stage, run in enumerate(ranges_of(partition)):
            parts = Counter(alike[layer] for layer in run)
            parts.update([-1] * (stage == 0) + [len(alike)] * (stage == last))
            shapes.append(tuple(sorted(parts.items())))
        return shapes

    @remembered(*PARTS, "micro", "widens_gradients")
    def of(self, config: Config, links: Links) -> Lazily[TimedPart]:
        """Return timed parts by position: -1 the embeddings, i the first of each run of equal layers, num_blocks the
        head. `links`: of the axes that cut a layer."""
        untimed = self.untimed(config)
        return Lazily(lambda position: self._time(config, untimed[position], links))

    def _time(self, config: Config, segment: EstimatedPart, links: Links) -> TimedPart:
        """Time the part at the quickest place in the step. Half of a backward pass's kernels count for weights. The
        widening of a layer's gradients is added, since a recording of one microbatch lacks this."""
        timer = self.planner.site.timer(links.world_size, config.precision.tf32)
        site, facts = self.planner.site, self.planner.cluster.links[links.transport]

        def seconds(mix: _Mix) -> float:
            where = timer, links, links.transport, config
            return max(0.0, sum(n * site.program_seconds(program, *where) for n, program in mix))

        forward, backward = (
            # Most microbatches neither gather (the first) nor sum (the last): the quickest place.
            min((seconds(mix), index) for index, mix in enumerate(segment.programs[task_kind]))
            for task_kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        )
        mix = segment.programs[TaskKind.BACKWARD][backward[1]]
        # A linear's backward pass has two products of equal flops: the input's gradient and the weight's, which is
        # left out for a frozen weight.
        matrices = [each for each in segment.parameters if each.spec.role.name == HIDDEN_MATRIX.name]
        trained = sum(each.num_elements for each in matrices if each.spec.role.rule.trained)
        share = trained / whole if (whole := sum(each.num_elements for each in matrices)) else 1.0
        weights = sum(times * timer.computing(program) for times, program in mix) * share / (1 + share)
        blocking = (n * timer.seconds(program, links.collective, 0.0, facts.tax) for n, program in mix)
        inputs, widened = max(0.0, sum(blocking)) - weights, 0.0
        if config.widens_gradients and segment.is_layer:
            trainable = [each for each in segment.parameters if each.spec.role.rule.trained]
            # Products add gradients of float32 to the sum themselves.
            learning = [each for each in trainable if each.dtype.itemsize < SINGLE]
            elements = sum(each.num_elements for each in learning)
            # Reads the gradient, reads and writes the sum.
            touched = sum(each.weight_bytes for each in learning) + 2 * SINGLE * elements
            widened = timer.kernel_seconds(Kernel("element", 0.0, touched, elements, "float32")) if learning else 0.0
            if config.model.routing.num_experts:
                # A recording of one microbatch copies the gradients of grouped products; others add them up.
                widened -= sum(
                    times * event.times * timer.kernel_seconds(event)
                    for times, program in mix
                    for event in program.events
                    if isinstance(event, Kernel) and event.operation == "copy_" and event.dtype != "float32"
                )
        each = forward[0], backward[0] + widened, inputs, weights + widened
        return TimedPart(segment, *(timer.part + seconds for seconds in each))

    @remembered(*PARTS, "micro")
    def untimed(self, config: Config) -> Lazily[EstimatedPart]:
        """Return the parts without seconds, equal in every order of axes."""
        smallest, micro = smallest_micro(config), config.micro
        # Recorded at the microbatch's own size for three reasons. Tensor sections that choose by size send other
        # tensors at other sizes. One sample is copied less often than several: a gather along the sequence is in order.
        # Each of the two sizes needs no other recording.
        as_is = config.layout.tensor.by_size or micro // smallest in (1, *_SIZES)
        sizes = (micro,) * 2 if as_is else tuple(size * smallest for size in _SIZES)
        share = 0.0 if as_is else (micro / smallest - _SIZES[0]) / (_SIZES[1] - _SIZES[0])
        chunks, parameters = self.distinct(config), self.parameters(config)
        before = {after: position for position, after in pairwise(chunks)}

        def recorded(size: int) -> Lazily[Recording]:
            alone = _alone(config, size)
            # Kinds of context parallelism differ in the order of tokens, which costs ends a copy of indices.
            ends = with_field(alone, "layout.context.kind", ContextParallel().kind)

            def record(position: int) -> Recording:
                # A part's input is the output of the part before, at the same size of microbatch.
                forms = chain[before[position]].outgoing if position in before else ()
                chunk = chunks[position]
                return self.planner.recordings.of(alone if chunk.layers else ends, chunk, forms)

            chain = Lazily(record)
            return chain

        small, large = map(recorded, sizes)

        def estimated(position: int) -> EstimatedPart:
            smaller, larger = small[position], large[position]
            programs = {
                task_kind: tuple(
                    _mixed(*both, share)
                    for both in zip(smaller.programs[task_kind], larger.programs[task_kind], strict=True)
                )
                for task_kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
            }
            kept_bytes = _bytes_at(share, _kept(smaller), _kept(larger))
            passing = _bytes_at(share, _passing(smaller), _passing(larger))
            sent = round(between(bytes_of(smaller.outgoing), bytes_of(larger.outgoing), share))
            return EstimatedPart(
                programs, kept_bytes, passing, sent, parameters[position], bool(chunks[position].layers)
            )

        return Lazily(estimated)

    @remembered(*PARTS)
    def parameters(self, config: Config) -> dict[int, tuple[Parameter, ...]]:
        """Return the parameters of each part, equal for every size of microbatch."""
        alone = _alone(config, smallest_micro(config))
        return {
            position: self.planner.recordings.parameters(alone, chunk)
            for position, chunk in self.distinct(config).items()
        }

    @remembered(*PARTS)
    def elements(self, config: Config) -> dict[int, int]:
        """Return the number of parameters' elements of each part."""
        return elements_of(self.parameters(config))

    @remembered(*PARTS, "memory.recompute")
    def kept_share(self, config: Config, position: int) -> float:
        """Return the share of a layer's kept bytes that remains if attention is recomputed. `position`: of the first
        equal layer."""
        kept_bytes, still = (_kept(recording) for recording in self._with_attention_again(config, position))
        return still / kept_bytes

    @remembered(*PARTS, "micro")
    def attention_again(self, config: Config, links: Links, position: int) -> float:
        """Return the seconds of a layer's attention kernels forward, which a backward pass repeats if attention is
        recomputed. `position`: of the first equal layer."""
        timer = self.planner.site.timer(links.world_size, config.precision.tf32)
        # Experts may multiply by batched products, too.
        steps = SOFTMAXES if config.model.routing.num_experts else BATCHED | SOFTMAXES
        return sum(
            share * event.times * timer.kernel_seconds(event)
            for share, program in self.untimed(config)[position].programs[TaskKind.FORWARD][-1]
            for event in program.events
            if isinstance(event, Kernel) and (event.kind == "attention" or event.operation in steps)
        )

    def _with_attention_again(self, config: Config, position: int) -> tuple[Recording, Recording]:
        """Return recordings of a layer for a small microbatch: (without, with) recomputed attention."""
        alone = _alone(config, _SIZES[0] * smallest_micro(config))
        again = with_field(alone, FIELD, config.memory.recompute)
        recordings, layer = self.planner.recordings, self.distinct(config)[position]
        forms = recordings.of(alone, Chunk(range(0), True, False), ()).outgoing
        once, twice = (recordings.of(variant, layer, forms) for variant in (alone, again))
        return once, twice


def elements_of(parts: Mapping[int, Sequence[Parameter]]) -> dict[int, int]:
    """Return the number of parameters' elements of each part, by position."""
    return {position: sum(each.num_elements for each in parameters) for position, parameters in parts.items()}


def smallest_micro(config: Config) -> int:
    """Return the least number of samples in a microbatch that gives every rank a sample."""
    sizes = dict(config.layout.tensor.axes)
    return math.prod(sizes[axis] for axis in config.layout.tensor.batch_axes)


def _alone(config: Config, micro: int) -> Config:
    """Return the config of one replica with one stage and one or two microbatches of `micro` samples a step."""
    data = config.layout.data
    sections = {
        "data": DataParallel(expert=data.expert, exchange=data.exchange),
        "pipeline": PipelineSection(),
        "order": "auto",
    }
    count = 2 if config.layout.tensor.by_size else 1  # the first microbatch gathers weights
    batch = config.batch.model_copy(update={"global_": count * micro, "micro": micro})
    memory = keeping_all(config).memory
    # Recordings are made before memory.summa is decided.
    if memory.summa == "auto":
        memory = memory.model_copy(update={"summa": "gather"})
    return config.model_copy(
        update={"layout": config.layout.model_copy(update=sections), "batch": batch, "memory": memory}
    )


def _kept(recording: Recording) -> int:
    """Return the bytes kept by the recording's forward pass."""
    return recording.programs[TaskKind.FORWARD][-1].kept_bytes


def _passing(recording: Recording) -> int:
    """Return the bytes of temporaries at the fullest moment of a pass, beside the bytes kept by the forward pass."""
    forward = recording.programs[TaskKind.FORWARD][-1]
    backward = min(program.peak_bytes for program in recording.programs[TaskKind.BACKWARD])
    return max(forward.peak_bytes - forward.kept_bytes, backward)


def _bytes_at(share: float, small: int, large: int) -> float:
    """Interpolate bytes at `share` between small (0) and large (1). Below the small size at most in proportion to
    samples: a head of more rows than a slice has equal bytes at both sizes, and fewer at a size without a whole
    slice."""
    return min(between(small, large, share), small * _of_small(share) if share < 0 else math.inf)


def _of_small(share: float) -> float:
    """Return the samples at `share` between the two sizes, in multiples of the small size."""
    first, second = _SIZES
    return 1 + share * (second - first) / first


def _mixed(small: Program, large: Program, share: float) -> _Mix:
    """Return the program interpolated at `share` between small (0) and large (1), or both with factors. Below the small
    size: the small program in proportion to samples, since a head of few rows has other slices."""
    program = interpolated_program(small, large, share)
    if program.events or not small.events:
        return ((1.0, program),)
    # The events differ (a GPU's head has more slices at the larger size), so only seconds are interpolated.
    return ((1 - share, small), (share, large)) if share >= 0 else ((_of_small(share), small),)


MIN_DEFERRED_SHARE = 0.5
"""Lower bound of the activations of deferred weight gradients, as a share of the estimate. The number of W that each
stage defers is uncertain."""


@dataclass
class HeldActivations:
    """Table of activation bytes by layout."""

    parts: TimedParts

    @remembered(*PARTS, "micro", "num_microbatches", "memory.recompute", "layout.pipeline")
    def of(self, config: Config, partition: tuple[int, ...]) -> tuple[HeldStage, ...]:
        """Return the stages that may be the fullest, independent of sync and states."""
        shapes, elements = self.parts.shapes(config, partition), self.parts.elements(config)
        parts, placement = self.parts.untimed(config), placement_of(config)
        found, deferring = [], self._deferring(config, partition, placement)
        rule, count = rule_of(config), config.num_microbatches
        sizes = [
            sum(times * elements[position] for at in positions for position, times in shapes[at])
            for positions in placement.positions
        ]
        # Candidates for the fullest: the first (most microbatches), the longest (most layers), the one with most
        # parameters, deferring ones (most W), the last (the head). A head in a chunk of its own has other microbatches
        # in flight than the stage's layers.
        stages = {0, placement.stage_of[partition.index(max(partition))], sizes.index(max(sizes)), *deferring}
        if placement.num_chunks == 1:
            stages.add(placement.last_stage)
        if len(self.parts.layers(config)) > 1:
            # Layers of several kinds: any stage may be the fullest, and of equal stages the first.
            firsts: dict[tuple[StageShape, ...], int] = {}
            for stage, positions in enumerate(placement.positions):
                firsts.setdefault(tuple(shapes[at] for at in positions), stage)
            stages.update(firsts.values())
        for stage in stages:
            positions = placement.positions[stage]
            works = [[(parts[layer], times) for layer, times in shapes[position]] for position in positions]
            # Microbatches in flight at the first backward task, once for each chunk; message-driven: the likely number.
            most = min(rule.limit_at(stage, placement, count), count * placement.num_chunks)
            in_flight = most if rule.fixed else rule.held(stage, placement.num_stages, most)
            if config.layout.pipeline.limit_by_memory:
                in_flight = 1  # the limit adapts to memory
            keeps = in_flight * sum(self._kept_bytes(config, shapes[at]) for at in positions) / placement.num_chunks
            if stage in deferring:
                whole = sum(times * segment.kept_bytes for work in works for segment, times in work if segment.is_layer)
                deferred = max(0, most - in_flight) * deferring[stage] * whole / placement.num_chunks
                keeps += MIN_DEFERRED_SHARE * deferred
            # Messages from both neighbours have memory before arrival (mailbox.py).
            ahead = min(AHEAD[self.parts.planner.cluster.device.kind], count)
            beside = max(
                ahead
                * (
                    (parts[shapes[at - 1][-1][0]].outgoing_bytes if at else 0)
                    + (parts[shapes[at][-1][0]].outgoing_bytes if at < len(shapes) - 1 else 0)
                )
                for at in positions
            )
            passing = max(self._passing_bytes(config, shapes[at]) for at in positions)
            found.append(HeldStage(keeps, keeps + beside + passing, sizes[stage] / max(sizes)))
        return tuple(found)

    def _passing_bytes(self, config: Config, shape: StageShape) -> float:
        """Return a lower bound of the bytes beside the kept ones at the fullest moment of a chunk's passes: temporaries
        of a part, and the activations of a recomputed group."""
        parts, policy = self.parts.untimed(config), config.memory.policy
        layers = [(parts[position], times) for position, times in shape if parts[position].is_layer]
        has_head = shape[-1][0] == config.model.num_blocks
        head, before = (parts[shape[-1][0]], parts[shape[-1][0]].kept_bytes) if has_head else (None, 0.0)
        most = [head.passing_bytes] if head else [0.0]
        if layers:
            num_layers = sum(times for _, times in layers)
            group = policy.group_size(config, num_layers) if policy.by_groups else 0
            # The backward pass of the last layers begins with all bytes but the head's.
            most.append(min(group * layer.kept_bytes + layer.passing_bytes for layer, _ in layers) - before)
            if policy.by_groups and policy.wrapped_layers(config, num_layers) == num_layers:
                groups = -(-num_layers // group)
                for layer, times in layers:
                    # Of n groups one has at least the n-th part of equal layers; later groups' inputs are freed.
                    freed = before + (num_layers - times) / group * layer.outgoing_bytes
                    most.append(-(-times // groups) * layer.kept_bytes + layer.passing_bytes - freed)
        return max(most)

    @remembered(
        "model", "data", "loss", "precision.products", "micro", "num_microbatches", "memory.recompute",
        "layout.pipeline", "layout.data.expert", "layout.data.exchange",
    )  # fmt: skip
    def _deferring(self, config: Config, partition: tuple[int, ...], placement: ChunkPlacement) -> dict[int, float]:
        """Return, by stage, the share of microbatches with W of recomputed layers deferred until the in-flight limit.

        A stage takes microbatches at the slowest stage's pace without W, and the remaining time is too short for all W.
        Of stages with equal layers only the last is returned, which waits for the fewest gradients.
        """
        rule, in_groups = rule_of(config), config.memory.policy.by_groups
        if rule.fixed or config.layout.pipeline.limit_by_memory or not (rule.splits and in_groups):
            return {}
        costs = self.parts.planner.work(config)
        layers = [sum(costs.layers[layer] for layer in layers) for layers in ranges_of(partition)]
        ends = [0.0] * len(layers)
        ends[0] += costs.embedding
        ends[-1] += costs.head
        stage_positions = [placement.positions[stage] for stage in range(placement.num_stages)]
        # A recomputed layer's F, second F, B and W take equal seconds; embeddings and head have no second F.
        weights = [sum(layers[at] + ends[at] for at in positions) / 3 for positions in stage_positions]
        passes = [sum(layers[at] + ends[at] * 2 / 3 for at in positions) for positions in stage_positions]
        alike = {tuple(partition[at] for at in positions): stage for stage, positions in enumerate(stage_positions)}
        return {
            stage: max(0.0, 1 - (max(passes) - passes[stage]) / weights[stage])
            for stage in alike.values()
            if weights[stage]
        }

    def _kept_bytes(self, config: Config, shape: StageShape) -> float:
        """Return the bytes that a forward pass keeps on a chunk; a recomputed group keeps its input."""
        parts, policy = self.parts.untimed(config), config.memory.policy
        every = {position: times * parts[position].kept_bytes for position, times in shape}
        if not policy.recomputes:
            return sum(every.values())
        layers = [(position, times) for position, times in shape if parts[position].is_layer]
        ends: float = sum(size for position, size in every.items() if not parts[position].is_layer)
        if config.layout.pipeline.chunks > 1:  # ends have other microbatches in flight than the stage's layers
            ends = 0.0
        if policy.attention:
            share = self.parts.kept_share
            return ends + sum(share(config, position) * every[position] for position, _ in layers)
        num_layers = sum(times for _, times in layers)
        wrapped = policy.wrapped_layers(config, num_layers) / max(1, num_layers)
        inputs = sum(times * parts[position].outgoing_bytes for position, times in layers)
        if shape[0][0] == -1:  # the first group's input is the embeddings' output
            ends -= parts[-1].outgoing_bytes
        # On a CPU, inputs offloaded to the host stay in the same memory.
        here = policy.keeps_inputs or self.parts.planner.cluster.device.kind == "cpu"
        kept_bytes = (1 - wrapped) * sum(every[position] for position, _ in layers)
        held = here * wrapped * inputs / max(1, policy.group_size(config, num_layers))
        return max(0.0, ends) + kept_bytes + held
