"""Estimates for the search: a layout's memory and seconds at a hundredth of a prediction's cost.

The memory of weights is that of the real kit's parameters in the real buckets. Seconds are composed as in a prediction
(predict.py), but of interpolated parts (timed_parts.py), and with a formula (`PipelineSeconds`) instead of a simulated
pipeline. Recomputation is not recorded, but computed: a longer backward pass and fewer kept activations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from operator import le, truediv
from typing import TYPE_CHECKING

from meshwright.compute.model import EMBEDDINGS, HEAD
from meshwright.compute.tensor.section import Whole
from meshwright.config import Config
from meshwright.config.layout import ContextParallel, PipelineSection
from meshwright.config.schema import BatchSection
from meshwright.config.section import with_field
from meshwright.planner.plan.buckets import HeldParameters, PlannedBucket, held_of, memory_of, streams
from meshwright.planner.plan.compose import StagePlan
from meshwright.planner.plan.least_memory import LeastMemory
from meshwright.planner.plan.memory import SURE_BYTES, HeldStage, Memory, Parameter, Peak
from meshwright.planner.plan.passes import Sum
from meshwright.planner.plan.process import least_communicator_bytes
from meshwright.planner.plan.recordings import check
from meshwright.planner.plan.remembered import PARTS, remembered, replaced
from meshwright.planner.plan.site import Links, transport_on
from meshwright.planner.plan.space import CHUNKS, ranks_of_layer
from meshwright.planner.plan.timed_parts import HeldActivations, StageShape, TimedParts, elements_of
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.planner.plan.timing import slowed
from meshwright.ranks.grid import PIPE
from meshwright.strategies.memory.section import KEEPS_ALL
from meshwright.strategies.pipeline.partition import balanced, ranges_of
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import ScheduleRule
from meshwright.strategies.pipeline.stages import placement_of, rule_of

if TYPE_CHECKING:
    from meshwright.planner.plan.predict import Planner

WEIGHTS = (
    *PARTS, "layout.data", "layout.pipeline.size", "layout.pipeline.chunks", "layout.pipeline.placement",
    "memory.offload", "optimizer",
)  # fmt: skip
"""Fields that weights, gradients and states depend on, except for the gradients' type and the partition."""

WIDENS, ACCUMULATES = "widens_gradients", "accumulates"

SURE = 0.99
"""Factor that makes estimated seconds a lower bound of predicted ones."""

MIN_RECOMPUTED_SHARE = 0.9
"""Lower bound of the share of a group's forward pass that is recomputed; the last layer's end is not."""

LAYER_END = 1 / 3
"""Most of a layer's forward pass that follows its last saved tensor: the last product of a feed-forward network."""

MAX_KEPT_SHARE = 0.99
"""Recomputing attention is worth trying if a layer then keeps less than this share of its activations."""


@dataclass(frozen=True)
class _Work:
    """A stage's seconds forward, backward, and of weight gradients if these are separate tasks (W); bytes sent to the
    next stage."""

    forward: float
    backward: float
    weights: float
    outgoing_bytes: int


@dataclass(frozen=True)
class _Passes:
    """The pipeline phase: its seconds, seconds until the end of the last stage's first forward pass, seconds of the
    longest last task of a stage, and the least seconds until each stage is done."""

    seconds: float
    forward: float
    last: float
    ends: tuple[float, ...]


@dataclass(frozen=True)
class _Ending:
    """Seconds after the pipeline phase on the stage with most parameters."""

    stage: int
    gather: float
    """Least seconds to gather sliced weights in a pass through the model."""
    reduce: float
    """Seconds of sums of gradients in a group of shards."""
    across: float
    """Seconds of sums of gradients across groups of shards."""
    steps: float
    """Seconds of the optimizer."""
    publish: float
    norm: float
    overlaps: float
    """The share of sums that runs under computation."""
    publishes: float
    """The share of publishing that runs under computation."""
    tax: float
    """The share by which hidden communication slows kernels."""


@dataclass(frozen=True, eq=False)
class ChainParameters:
    """The parameters of a chain's distinct parts, and each layer's part. Instances are equal only if identical."""

    parts: dict[int, tuple[Parameter, ...]]
    alike: tuple[int, ...]


class Estimates:
    """Bounds and estimates for layouts of any runs on one cluster; remembers the parts shared by several layouts."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.parts = TimedParts(planner)
        self._held = HeldActivations(self.parts)
        self._least = LeastMemory(planner.buckets, self.parts, self._held)
        self._by_parameters: dict[str, ChainParameters] = {}

    def estimated_seconds(self, config: Config, cutoff: float = math.inf) -> float:
        """Return SURE times the estimated seconds of a step; if the pipeline phase alone takes `cutoff` or more, SURE
        times the seconds of this phase."""
        links = self.planner.site.links(config, PIPE)
        candidates = (self._passes(config, partition, links) for partition in self._partitions(config))
        passes = min(candidates, key=lambda each: each.seconds)
        if SURE * passes.seconds >= cutoff:
            return SURE * passes.seconds
        ending = self._ending(config, self._partition(config))
        # Slices are summed among a shard's ranks for every microbatch. The rest, or whole gradients, are summed once,
        # under the last task of the phase. Buckets of other chunks than the last task's have been sent before.
        earlier = self._earlier_sums(config)
        reduce = ending.reduce / config.layout.pipeline.chunks
        final = reduce + ending.across / config.layout.pipeline.chunks
        gather = 2 * config.num_microbatches * ending.gather
        exposed = earlier * max(0.0, reduce - ending.overlaps * passes.last)
        # A stage that is done before the others sums meanwhile.
        begin = passes.ends[ending.stage] - passes.seconds
        exposed += max(0.0, begin + max(0.0, final - ending.overlaps * passes.last))
        exposed += max(0.0, gather - ending.publishes * passes.seconds)
        exposed += max(0.0, ending.publish - ending.publishes * passes.forward)
        hidden = slowed(earlier * reduce + final + gather + ending.publish - exposed, ending.tax)
        steps = 0.0 if streams(config) else ending.steps
        return SURE * (passes.seconds + exposed + hidden + ending.norm + steps)

    def _earlier_sums(self, config: Config) -> int:
        """Return the number of sums of sliced gradients before the step's last microbatch."""
        sums = config.layout.data.strategy.slices and not self.planner.buckets.are_late(config)
        return config.num_microbatches - 1 if sums else 0

    def least_with_sums(self, config: Config, every: tuple[Links, ...], cutoff: float) -> float:
        """Return a lower bound of estimated_seconds in the config's order of axes, on one stage, which counts
        communication of data parallelism, without a recording of the cut layer; or the first bound that is `cutoff` or
        more.

        Args:
            config: The layout.
            every: As in phase_seconds.
            cutoff: In seconds.
        """
        keeper = with_field(config, "memory.recompute", KEEPS_ALL)
        forward, backward = self.seconds_of_cuts(keeper, every)[every.index(self.links_of_layer(config))]
        least = _least_step(config, [(forward, backward)])
        if least >= cutoff:
            return least
        ending, count = self._ending(config, self._partition(config)), config.num_microbatches
        # A step of P seconds has `count` backward passes and as many forward passes, of `forward` seconds at least.
        earlier = self._earlier_sums(config)
        final, in_forward = ending.reduce + ending.across, ending.overlaps * forward
        # (seconds, the share of P that hides these)
        hidden = [
            (earlier * (ending.reduce + in_forward), ending.overlaps * earlier / count),
            (final + in_forward, ending.overlaps / count),
            (2 * count * ending.gather, ending.publishes),
            (ending.publish, ending.publishes),
        ]
        every_sum = earlier * ending.reduce + final + 2 * count * ending.gather + ending.publish

        def step(phase: float) -> float:
            exposed = sum(max(0.0, seconds - share * phase) for seconds, share in hidden)
            return phase + exposed + slowed(every_sum - exposed, ending.tax)

        # Linear in P between corners, so the least step has P at a corner.
        corners = [seconds / share for seconds, share in hidden if share]
        phases = [least / SURE, *(phase for phase in corners if phase > least / SURE)]
        return SURE * (min(map(step, phases)) + ending.norm + (0.0 if streams(config) else ending.steps))

    def links_of_layer(self, config: Config) -> Links:
        """Return the links that a layer uses: the only influence of the order of axes on a layer's seconds."""
        return self.planner.site.links(config)

    def phase_seconds(self, config: Config, every: tuple[Links, ...] = ()) -> float:
        """Return SURE times the estimated seconds of the pipeline phase with messages that take no time. This is a
        lower bound of estimated_seconds in all orders of axes with one of the links `every` inside of a layer; without
        `every`: with the links of the config's own order."""
        rule, placement, limits = self._limits(config)
        turns = self.stage_seconds(config, every or (self.planner.site.links(config),), placement, rule.splits)
        count = config.num_microbatches
        return SURE * min(each.seconds(count, limits) for each in turns)

    def least_seconds(self, config: Config, every: tuple[Links, ...] = (), *, layers: bool = False) -> float:
        """Return a lower bound of the estimated seconds of all layouts that differ in schedule, limit or sync only:
        the chain's work, shared equally among stages. `layers`: the work of layers alone, which records no head.
        `every`: as in phase_seconds."""
        return _least_step(config, self.whole_seconds(config, every or (self.planner.site.links(config),), layers))

    def least_of_cuts(self, config: Config, every: tuple[Links, ...]) -> float:
        """Return a lower bound of least_seconds from models with one cut, or from whole layers, without recordings of
        layers with this cut; 0 for whole layers.

        A layer with both cuts has the kernels of a layer with either, in smaller pieces, and sends as many bytes in a
        step for each cut as with this cut alone. So the seconds of both cuts beyond the whole layer's add up, on the
        same links. A layer with one cut takes at least an equal share of the whole layer's seconds. `every`: as in
        phase_seconds.
        """
        if not (config.layout.context.axes or config.layout.tensor.axes):
            return 0.0
        policy, whole = config.memory.policy, config
        if policy.attention or policy.recorded:  # seconds that only a recording of this cut gives
            whole = with_field(config, "memory.recompute", KEEPS_ALL)
        return _least_step(config, self.seconds_of_cuts(whole, every))

    def least_of_whole(self, config: Config, every: tuple[Links, ...]) -> float:
        """Return a lower bound of least_seconds from whole layers, in equal shares of a layer's ranks. `every`: as in
        phase_seconds."""
        whole = with_field(config, "memory.recompute", KEEPS_ALL)
        *_, (uncut, names, ranks) = self.fewer_cuts(whole)
        seconds = self.whole_seconds(uncut, tuple(dict.fromkeys(links.along(names) for links in every)), True)
        return _least_step(config, [(forward / abs(ranks), backward / abs(ranks)) for forward, backward in seconds])

    @remembered(*PARTS, "micro", WIDENS, "memory.recompute")
    def seconds_of_cuts(self, config: Config, every: tuple[Links, ...]) -> list[tuple[float, float]]:
        """Return a lower bound of whole_seconds from models with fewer cuts (least_of_cuts)."""
        sums = [(0.0, 0.0)] * len(every)
        for cut, names, divided in self.fewer_cuts(config):
            along_cut = [links.along(names) for links in every]
            # Orders of axes that differ in other axes only have the same links here.
            distinct = tuple(dict.fromkeys(along_cut))
            seconds = dict(zip(distinct, self.whole_seconds(cut, distinct, False), strict=True))
            sums = [
                (forward + seconds[links][0] / divided, backward + seconds[links][1] / divided)
                for (forward, backward), links in zip(sums, along_cut, strict=True)
            ]
        return sums

    @remembered(*PARTS, "micro", WIDENS, "memory.recompute")
    def fewer_cuts(self, config: Config) -> list[tuple[Config, set[str], int]]:
        """Return the models with fewer cuts, each with the names of a layer's axes and the divisor of its seconds; a
        negative one subtracts the whole model, which both cuts include."""
        batch = "micro", WIDENS
        inside = replaced(config, "layout.context", ContextParallel(), *batch)
        along = replaced(config, "layout.tensor", Whole(), *batch)
        whole, ranks = replaced(inside, "layout.tensor", Whole(), *batch), ranks_of_layer(config.layout)
        both = config.layout.context.axes and config.layout.tensor.axes
        cuts = ((inside, ranks_of_layer(along.layout)), (along, ranks_of_layer(inside.layout))) if both else ()
        # A step has more microbatches if more ranks share a layer.
        divided = (*cuts, (whole, -ranks if both else ranks))
        return [(cut, {name for name, _ in cut.layout.layer_axes}, divisor) for cut, divisor in divided]

    @remembered(*PARTS, "micro", WIDENS, "memory.recompute")
    def whole_seconds(self, config: Config, every: tuple[Links, ...], layers: bool) -> list[tuple[float, float]]:
        """Return the seconds forward and backward of the whole model as one stage, for each of the links. An equal
        share of this work is at most the slowest stage's work."""
        shape = self.parts.shapes(config, (config.model.num_blocks,))[0]
        if layers:
            shape = tuple(each for each in shape if 0 <= each[0] < config.model.num_blocks)
        works = (self._work(config, shape, links, False) for links in every)
        return [(work.forward, work.backward) for work in works]

    @remembered("layout.pipeline", "num_microbatches", "layout.data.exchange", "layout.data.expert")
    def _limits(self, config: Config) -> tuple[ScheduleRule, ChunkPlacement, tuple[int, ...]]:
        """Return the schedule, the placement of chunks, and each stage's limit of microbatches in flight."""
        rule, placement, count = rule_of(config), placement_of(config), config.num_microbatches
        return rule, placement, tuple(rule.limit_at(stage, placement, count) for stage in range(placement.num_stages))

    @remembered(
        *PARTS, "micro", WIDENS, "memory.recompute", "replica_batch", "layout.pipeline.size", "layout.pipeline.chunks",
        "layout.pipeline.partition",
    )  # fmt: skip
    def stage_seconds(
        self, config: Config, every: tuple[Links, ...], placement: ChunkPlacement, splits: bool
    ) -> list[PipelineSeconds]:
        """Return the seconds of stages without messages, for each of the links and each candidate partition, equal for
        all schedules and limits."""
        turns = []
        for links, partition in product(self.fastest_links(config, every), self._partitions(config)):
            chunks = self._works(config, partition, links, splits)
            turns.append(PipelineSeconds.of(chunks, [0.0] * (len(chunks) - 1), placement))
        return turns

    @remembered(*PARTS, "micro", WIDENS, "memory.recompute")
    def fastest_links(self, config: Config, every: tuple[Links, ...]) -> tuple[Links, ...]:
        """Return the links without those on which each part of the model takes at least as long as on others."""
        seconds: dict[tuple[float, ...], Links] = {}
        for links in every:
            parts = self.parts.of(config, links)
            timed = (parts[position] for position in self.parts.distinct(config))
            layers = self.parts.layers(config) if config.memory.policy.attention else ()
            again = (self.parts.attention_again(config, links, position) for position in layers)
            facts = (x for each in timed for x in (each.forward, each.backward, each.inputs, each.weights))
            seconds.setdefault((*facts, *again), links)
        return tuple(
            links
            for slow, links in seconds.items()
            if not any(fast != slow and all(map(le, fast, slow)) for fast in seconds)
        )

    def estimated_memory(self, config: Config) -> Memory:
        """Return SURE_BYTES times the estimated memory of the fullest rank, equal in every order of axes. Temporaries
        reuse the bytes of wider gradients."""
        return self.with_activations(*self.alone_memory(config), self.held_activations(config))

    def held_activations(self, config: Config) -> tuple[HeldStage, ...]:
        """Return the activations of the stages that may be the fullest, independent of sync and states."""
        return self._held.of(config, self._partition(config))

    @staticmethod
    def with_activations(alone: Memory, passing: int, stages: Sequence[HeldStage]) -> Memory:
        """Return the estimated memory of the fullest rank.

        Args:
            alone: Memory without activations, of the stage with most parameters (alone_memory).
            passing: Bytes of `alone` that are not alive at the activations' peak.
            stages: Activations of the stages that may be the fullest.
        """
        every = []
        for stage in stages:
            activations = int(SURE_BYTES * stage.kept_bytes)
            weights, gradients, states, temporaries, passes = (
                int(stage.share * each)
                for each in (alone.weights, alone.gradients, alone.states, alone.temporaries, passing)
            )
            most = max(int(SURE_BYTES * stage.peak_bytes) + passes, temporaries)
            every.append(
                replace(
                    alone, weights=weights, gradients=gradients, states=states, activations=activations,
                    temporaries=most - activations,
                )
            )  # fmt: skip
        return max(every, key=lambda memory: memory.total)

    def alone_memory(self, config: Config) -> tuple[Memory, int]:
        """Return (weights_memory, bytes of this memory not alive at the activations' peak (HeldBytes.passing))."""
        return self._alone_memory(config, self._partition(config))

    def least_alone(self, config: Config) -> float:
        """Return a lower bound of the bytes of alone_memory, without buckets."""
        least, offloads = self._least.of_weights(config, self._partition(config)), config.memory.offload.to != "none"
        return least.weights + (0.0 if offloads else least.states) + self.planner.site.context(config)

    def recorded_parts(self, config: Config) -> Collection[int]:
        """Return the positions of parts recorded for the microbatch's size; later recordings add positions."""
        return self.parts.untimed(config)

    def least_activations(self, config: Config) -> tuple[HeldStage, ...]:
        """Return lower bounds of held_activations, from recordings of whole layers."""
        return self._least.of_activations(config, self._partition(config))

    def recomputes_for_nothing(self, config: Config) -> bool:
        """Return True if the layout recomputes attention although the kernel keeps too little (MAX_KEPT_SHARE)."""
        if not config.memory.policy.attention:
            return False
        return all(self.parts.kept_share(config, each) > MAX_KEPT_SHARE for each in self.parts.layers(config))

    def weights_memory(self, config: Config) -> Memory:
        """Return the weights, gradients, states and communicators of the stage with most parameters, in any order of
        axes."""
        return self.alone_memory(config)[0]

    @remembered(*WEIGHTS, ACCUMULATES, "layout.transport", "layout.pipeline.partition", "layout.pipeline.head")
    def _alone_memory(self, config: Config, partition: tuple[int, ...]) -> tuple[Memory, int]:
        check(config)
        data, placement, device = config.layout.data, placement_of(config), self.planner.cluster.device
        (_, held), context = self._fullest(config, partition, placement), self.planner.site.context(config)
        weights = 0 if data.strategy.gathers else held.weight_bytes
        gradients = 0 if data.strategy.slices else held.gradient_bytes(config)
        memory = Memory(weights, gradients, 0, 0, 0, context)
        if memory.total > device.memory_bytes:  # does not fit even without buckets
            return memory, 0
        buckets = self._buckets_of_fullest(config, partition)
        ordered = replaced(config, "layout.order", "auto", ACCUMULATES)  # all orders have equal numbers of ranks
        memory = memory_of(ordered, buckets, Peak(0, 0), self.planner.site)
        links = self.planner.cluster.links.get(transport_on(self.planner.cluster, config))
        communicators = least_communicator_bytes(ordered, links.channels if links else 0)
        return replace(memory, communicators=communicators), held_of(config, buckets).passing

    def _partitions(self, config: Config) -> tuple[tuple[int, ...], ...]:
        """Return balanced stages, and stages with equal numbers of layers if these differ. The clock's search for
        stages starts at balanced ones; under GPipe with a large head the search ends at even stages."""
        partition = self._partition(config)
        each, rest = divmod(config.model.num_blocks, len(partition))
        even = (each + 1,) * rest + (each,) * (len(partition) - rest)
        # A position inside of the chain has at least one layer.
        both = even != partition and each and config.layout.pipeline.partition == "auto"
        return (partition, even) if both else (partition,)

    def _works(self, config: Config, partition: tuple[int, ...], links: Links, splits: bool) -> list[_Work]:
        """Return the work of each position of the chain. `links`: of the axes that cut a layer."""
        shapes = self.parts.shapes(config, partition)
        works = {shape: self._work(config, shape, links, splits) for shape in dict.fromkeys(shapes)}
        return [works[shape] for shape in shapes]

    @remembered(*PARTS, "micro", "num_microbatches", WIDENS, "memory.recompute", "layout.pipeline")
    def _passes(self, config: Config, partition: tuple[int, ...], links: Links) -> _Passes:
        """Estimate the pipeline phase. `links`: with the pipe axis."""
        rule, placement, limits = self._limits(config)
        # A layer's seconds depend on the strides of the layer's own axes only.
        layer_links = links.along({name for name, _ in config.layout.layer_axes})
        chunks = self._works(config, partition, layer_links, rule.splits)
        # Messages of rank 0's pipeline only; a prediction takes each stage's first rank.
        ranks, site, count = links.stages(), self.planner.site, config.num_microbatches
        hops = [
            site.message_seconds(config, links, ranks[start], ranks[end], chunk.outgoing_bytes) if start != end else 0.0
            for (start, end), chunk in zip(pairwise(placement.stage_of), chunks[:-1], strict=True)
        ]
        phase = PipelineSeconds.of(chunks, hops, placement)
        last = max(chunk.weights if rule.splits else chunk.backward for chunk in chunks)
        forward = sum(chunk.forward for chunk in chunks) + sum(hops)
        return _Passes(phase.seconds(count, limits), forward, last, tuple(phase.ends(count)))

    @remembered(*PARTS, "micro", WIDENS, "memory.recompute")
    def _work(self, config: Config, shape: StageShape, links: Links, split: bool) -> _Work:
        parts = self.parts.of(config, links)
        stage = [(parts[layer], times) for layer, times in shape]
        policy, again = config.memory.policy, 0.0
        layers = sum(times for timed, times in stage if timed.part.is_layer)
        if policy.attention:
            seconds = (
                times * self.parts.attention_again(config, links, position)
                for (position, times), (timed, _) in zip(shape, stage, strict=True)
                if timed.part.is_layer
            )
            again = MIN_RECOMPUTED_SHARE * sum(seconds)
        elif policy.by_groups and not policy.recorded and layers:  # recorded policies may recompute little
            forward = sum(times * timed.forward for timed, times in stage if timed.part.is_layer)
            repeated = max(MIN_RECOMPUTED_SHARE, 1 - LAYER_END / policy.group_size(config, layers))
            again = repeated * forward * (policy.wrapped_layers(config, layers) / layers)
        return _Work(
            sum(times * timed.forward for timed, times in stage),
            sum(times * (timed.inputs if split else timed.backward) for timed, times in stage) + again,
            sum(times * timed.weights for timed, times in stage) if split else 0.0,
            stage[-1][0].part.outgoing_bytes,
        )

    @remembered(*WEIGHTS, ACCUMULATES, "layout.transport", "layout.order", "batch.global_")
    def _ending(self, config: Config, partition: tuple[int, ...]) -> _Ending:
        fullest, held = self._fullest(config, partition, placement_of(config))
        stage = StagePlan((), held.parameters)
        planned = {0: self._buckets_of_fullest(config, partition)}
        # A step of one microbatch has the same ending under any schedule.
        pipeline = PipelineSection().model_copy(update={"size": config.layout.pipeline.size})
        batch = BatchSection().model_copy(update={"global_": config.batch.global_, "micro": config.replica_batch})
        single_step = replaced(replaced(config, "layout.pipeline", pipeline, ACCUMULATES), "batch", batch, ACCUMULATES)
        run = TimedRun(self.planner.site, self.planner.buckets, single_step, [stage], planned)
        known: dict[Hashable, tuple[Sum, float]] = {}
        every = []
        for bucket in run.buckets[0]:
            # Buckets of equal layers are equal and share programs.
            alike = id(bucket.sums), len(bucket.names), bucket.stepped
            if alike not in known:
                known[alike] = run.sum(bucket, 0.0), run.seconds(bucket.across)
            every.append(known[alike])
        sums, across = [bucket for bucket, _ in every], sum(seconds for _, seconds in every)
        gathered = [bucket.gather for bucket in run.buckets[0]] if config.layout.data.strategy.gathers else []
        each = {id(gather): run.seconds(gather) for gather in {id(gather): gather for gather in gathered}.values()}
        gathers = sorted(each[id(gather)] for gather in gathered)
        return _Ending(
            fullest,
            # Weights of two parts stay gathered between passes: the largest two, for a lower bound.
            sum(gathers[:-2]),
            sum(bucket.reduce for bucket in sums) - across, across,
            sum(max(bucket.steps, bucket.lane) for bucket in sums), sum(bucket.publish for bucket in sums), run.norm(),
            run.overlap("sums"), run.overlap("gathers"), run.network.tax,
        )  # fmt: skip

    def _fullest(
        self, config: Config, partition: tuple[int, ...], placement: ChunkPlacement
    ) -> tuple[int, HeldParameters]:
        """Return the stage with most elements, and its parameters."""
        return self.fullest_of(self.same_parameters(config), partition, placement)

    @remembered(*PARTS)
    def same_parameters(self, config: Config) -> ChainParameters:
        """Return the parameters of the chain's parts. Layouts with equal parameters share one object: kinds of context
        parallelism cut no parameter."""
        parts, alike = self.parts.parameters(config), self.planner.recordings.outline(config).alike
        # As text, since specs hold dictionaries and have no hash.
        return self._by_parameters.setdefault(f"{parts} {alike}", ChainParameters(parts, alike))

    @remembered()
    def fullest_of(
        self, chain: ChainParameters, partition: tuple[int, ...], placement: ChunkPlacement
    ) -> tuple[int, HeldParameters]:
        """Return the stage with most elements, and its parameters."""
        parts, alike, runs = chain.parts, chain.alike, ranges_of(partition)
        elements = elements_of(parts)
        held = [
            [layer for at in placement.positions[stage] for layer in runs[at]] for stage in range(placement.num_stages)
        ]
        sizes = [sum(elements[alike[layer]] for layer in layers) for layers in held]
        sizes[0] += elements[-1]
        sizes[placement.last_stage] += elements[len(alike)]  # a tied table of one stage is counted twice, and held once
        stage = sizes.index(max(sizes))
        parameters = {each.name: replace(each, parts=(EMBEDDINGS,)) for each in parts[-1]} if stage == 0 else {}
        for layer in held[stage]:
            parameters |= {
                f"{layer} {each.name}": replace(each, name=f"{layer} {each.name}", parts=(layer,))
                for each in parts[alike[layer]]
            }
        if stage == placement.last_stage:
            for each in parts[len(alike)]:
                parameters[each.name] = replace(
                    each, parts=(*(parameters[each.name].parts if each.name in parameters else ()), HEAD)
                )
        tied = {each.name for each in parts[-1]} & {each.name for each in parts[len(alike)]}
        return stage, HeldParameters(tuple(parameters.values()), frozenset(tied if placement.last_stage else ()))

    @remembered(*WEIGHTS, ACCUMULATES)
    def _buckets_of_fullest(self, config: Config, partition: tuple[int, ...]) -> list[PlannedBucket]:
        """Return the buckets of the stage with most elements, equal in every order of axes."""
        _, held = self._fullest(config, partition, placement_of(config))
        return self.planner.buckets.of(replaced(config, "layout.order", "auto", ACCUMULATES), 0, held)

    @remembered(
        "model", "data", "loss", "precision.products", "replica_batch", "layout.pipeline.size",
        "layout.pipeline.chunks", "layout.pipeline.partition",
    )  # fmt: skip
    def _partition(self, config: Config) -> tuple[int, ...]:
        """Return the number of layers by position. For `auto`: the balanced cut that the clock starts from, since the
        clock's own choice of layers takes longer than an estimate."""
        pipeline, samples = config.layout.pipeline, config.replica_batch
        if not isinstance(pipeline.partition, str):
            return pipeline.partition
        # The work's proportions are the same for any microbatch of a step with equally many samples.
        batch = BatchSection().model_copy(update={"global_": samples, "micro": samples})
        replica = with_field(config.model_copy(update={"batch": batch}), "layout.data.size", 1)
        return balanced(self.planner.work(replica), pipeline.size * pipeline.chunks)


def _least_step(config: Config, works: Sequence[tuple[float, float]]) -> float:
    """Return SURE times the least seconds of a step with an equal share of the work on each stage. `works`: seconds
    forward and backward of the whole model, in each order of axes."""
    pipeline = config.layout.pipeline
    # The last stage begins when the first microbatch has passed one chunk of each other stage.
    fill = (pipeline.size - 1) / max(CHUNKS, pipeline.chunks)
    count = config.num_microbatches
    return SURE * min(count * (forward + backward) + fill * forward for forward, backward in works) / pipeline.size


@dataclass
class PipelineSeconds:
    """Seconds of the pipeline phase of any number m of microbatches under any limits.

    A position of the chain takes f, b, w for tasks F, B, W, and h for a message to the next position; w = 0 if B
    includes W. Stage s has its first chunk at position s and at most k microbatches in flight, counted once for each
    chunk. The phase takes the maximum over s of

    | the seconds until                                      | seconds                                            |
    |--------------------------------------------------------|----------------------------------------------------|
    | s has done all tasks, after one F of each stage ahead  | sum of f + h ahead of s, m (f + b + w) of chunks   |
    | stage 0 has received the gradients of the last B of s  | the same without w, sum of b + h ahead of s, w_0   |
    | the limit of s has let all microbatches pass           | m / k times from each chunk of s to the end and    |
    |                                                        | back: sum of f + b + 2h                            |
    """

    ahead: list[float]
    """By stage, the sum of f + h ahead."""
    turned: list[float]
    """By stage, f + b of a microbatch."""
    weights: list[float]
    """By stage, w of a microbatch."""
    behind: list[float]
    """By stage, the sum of b + h ahead, and w of stage 0."""
    back: list[float]
    """By stage, the seconds from each chunk to the end and back."""
    _unlimited: dict[int, float] = field(default_factory=dict)
    """The first two rows of the table, by m."""

    @classmethod
    def of(cls, chunks: Sequence[_Work], hops: Sequence[float], placement: ChunkPlacement) -> PipelineSeconds:
        """Sum the work of the chain's positions by stage. `hops`: seconds of the message after each position."""
        ahead, behind = (
            list(accumulate((each + hop for each, hop in zip(seconds, hops, strict=False)), initial=0.0))
            for seconds in ([chunk.forward for chunk in chunks], [chunk.backward for chunk in chunks])
        )  # seconds until a message has reached each position, with one task in each position before
        there_and_back = ahead[-1] + chunks[-1].forward + chunks[-1].backward + behind[-1]
        of_stage = placement.positions
        return cls(
            ahead[: len(of_stage)],
            [sum([chunks[at].forward + chunks[at].backward for at in positions]) for positions in of_stage],
            [sum([chunks[at].weights for at in positions]) for positions in of_stage],
            [behind[stage] + chunks[0].weights for stage in range(len(of_stage))],
            [sum([there_and_back - ahead[at] - behind[at] for at in positions]) for positions in of_stage],
        )

    def ends(self, count: int) -> list[float]:
        """Return the least seconds until each stage has done the tasks of `count` microbatches."""
        stages = zip(self.ahead, self.turned, self.weights, strict=True)
        return [ahead + count * turned + count * weights for ahead, turned, weights in stages]

    def seconds(self, count: int, limits: Sequence[int]) -> float:
        """Return the seconds of `count` microbatches. `limits`: by stage, the most microbatches in flight."""
        unlimited = self._unlimited.get(count)
        if unlimited is None:
            received = map(
                lambda ahead, turned, behind: ahead + count * turned + behind, self.ahead, self.turned, self.behind
            )
            unlimited = self._unlimited[count] = max(*self.ends(count), *received)
        return max(unlimited, count * max(map(truediv, self.back, limits)))
