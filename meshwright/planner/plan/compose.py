"""A run composed of recordings: for each stage the costs of tasks, the parameters, the sent bytes.

Tasks run parts one after the other, forward from the first, backward from the last. Memory is summed from part to
part. A part's output to the next part stays in memory, for the next part's backward pass. An output to
another stage is freed after sending, and a received input stays. Stages with equal tasks and parameters are computed
once.

A stage of several chunks has common buckets for all parameters, and separate tasks for each chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import pairwise, product

from meshwright.compute.model import EMBEDDINGS, HEAD, Chunk
from meshwright.compute.models.chain import split_name
from meshwright.config import Config
from meshwright.planner.plan.buckets import Buckets, HeldParameters, PlannedBucket, loads_program
from meshwright.planner.plan.memory import Parameter
from meshwright.planner.plan.recorder import Cost, Program, Seconds, place
from meshwright.planner.plan.recordings import Forms, Recording, Recordings, bytes_of
from meshwright.planner.plan.remembered import COUNTS, remembered, replaced
from meshwright.ranks.grid import PIPE
from meshwright.ranks.ledger import MESSAGE, Ledger, Traffic
from meshwright.ranks.mailbox import Side
from meshwright.strategies.data_parallel.gathering import Walk
from meshwright.strategies.memory.section import FIELD, KEEPS_ALL
from meshwright.strategies.pipeline.pipeline import message_forms, sides_of
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.span import CATEGORIES
from meshwright.strategies.pipeline.stages import chunks_of, piece_placement_of, placement_of, rule_of
from meshwright.strategies.pipeline.task import TaskKind

Sent = dict[tuple[str, str], Traffic]
Gathered = Mapping[tuple[TaskKind, int], Sequence[int]]
"""Indices of the buckets that a task gathers, by the task's kind and chunk."""


@dataclass(frozen=True)
class Unit:
    """Chain parts that run together: one part, or a recomputed group of `layers` equal layers.

    The cost of a group is extrapolated from recordings of two layers (`recording`) and of one (`smaller`). `whole`
    records the group itself.
    """

    recording: Recording
    parameters: tuple[Parameter, ...]
    whole: Callable[[], Recording]
    smaller: Recording | None = None
    layers: int = 1

    def cost(self, task_kind: TaskKind, which: int, seconds: Seconds) -> Cost:
        costs = [
            Cost(seconds(program), program.kept_bytes, program.peak_bytes, program.flops, program.host_bytes)
            for program, _ in self.passes(task_kind, which)
        ]
        return costs[0] if self.smaller is None else costs[0].extended(costs[1], self.layers - 2)

    def passes(self, task_kind: TaskKind, which: int) -> list[tuple[Program, int]]:
        """Return the recorded programs that add up to the unit's task, each with its count. In an extrapolated group
        two layers count layers - 1 times, and one layer 2 - layers times (negative)."""
        passes = [(self.recording.programs[task_kind][which], max(1, self.layers - 1))]
        if self.smaller is not None:
            passes.append((self.smaller.programs[task_kind][which], 2 - self.layers))
        return passes

    def freed(self, task_kind: TaskKind, read_bytes: int) -> int:
        """Return the bytes that a task frees: the unit's input of `read_bytes`, and the gradient received from the next
        part. B frees both, except for bytes that W needs."""
        gradient_bytes = bytes_of(self.recording.outgoing)
        waits = (
            min(read_bytes, self.recording.kept_input_bytes),
            min(gradient_bytes, self.recording.kept_gradient_bytes),
        )
        # If W is no task of its own, a recording keeps nothing for W, and B frees all.
        return sum(waits) if task_kind is TaskKind.WEIGHT else read_bytes + gradient_bytes - sum(waits)


@dataclass(frozen=True)
class ChunkPlan:
    """The tasks of a chunk."""

    units: tuple[Unit, ...]
    """In the order of the forward pass."""
    incoming: Forms
    """Shapes and dtypes of the message before the chunk."""
    outgoing: Forms
    """Shapes and dtypes of the message after the chunk."""
    handed_bytes: int | None = None
    """Bytes left by the position before, if this stage also holds that position; None: the input is a message."""
    hands_on: bool = False
    """Whether this stage also holds the position after."""

    def cost(self, task_kind: TaskKind, which: int, seconds: Seconds = lambda program: 0.0) -> Cost:
        """Return the cost of a task at a place of the step (recordings.place); without `seconds` only bytes and
        operations."""
        return reduce(Cost.then, self.costs(task_kind, which, seconds), Cost())

    def costs(self, task_kind: TaskKind, which: int, seconds: Seconds) -> list[Cost]:
        """Return the cost of each unit in the order of execution. Bytes of messages count in the first and the last
        unit."""
        order = self.units if task_kind is TaskKind.FORWARD else self.units[::-1]
        costs = [unit.cost(task_kind, which, seconds) for unit in order]
        comes, leaves = self.handed_bytes is None, not self.hands_on
        if task_kind is TaskKind.FORWARD:
            pairs = pairwise(order)
            output_bytes = (
                0 if unit.recording.holds_input else before.recording.output_bytes for before, unit in pairs
            )
            freed = [0, *output_bytes]
            # The mailbox allocates a received activation before the task, and frees a sent one. Between chunks of one
            # stage there is no message.
            freed[-1] += order[-1].recording.output_bytes * leaves - bytes_of(self.incoming) * comes
        else:
            # B frees the inputs of parts. A part that does not read its input freed the input in F.
            pairs = pairwise(order)
            given = [before.recording.output_bytes if unit.recording.holds_input else 0 for unit, before in pairs]
            given.append(bytes_of(self.incoming) if self.handed_bytes is None else self.handed_bytes)
            freed = [unit.freed(task_kind, num_bytes) for unit, num_bytes in zip(order, given, strict=True)]
        if task_kind is TaskKind.BACKWARD:
            freed[0] -= bytes_of(self.outgoing) * leaves  # received by a message, counted there
            freed[-1] += bytes_of(self.incoming) * comes  # made here, and sent
        return [
            cost._replace(kept_bytes=cost.kept_bytes - num_bytes) for cost, num_bytes in zip(costs, freed, strict=True)
        ]


COUNTING = "the pass that counts experts' loads"
"""A forward pass before the step, if a router's balance is over the batch (training/step.py)."""
BUCKETS = "buckets"
"""The part of the model in the ledger of gradient sums: parameters that share flat memory."""


@dataclass(frozen=True)
class Sending:
    """An item of a rank's ledger of a step."""

    task: str
    """The kind of task that sends: forward, backward or weight, or another part of the step."""
    part: str
    """The part of the model."""
    program: Program
    """The program that sends; without events if not recorded."""
    times: int = 1


@dataclass(frozen=True)
class StagePlan:
    """A stage's chunks, and its parameters in the model's order."""

    chunks: tuple[ChunkPlan, ...]
    parameters: tuple[Parameter, ...]

    def apart_bytes(self, config: Config) -> int:
        """Return the bytes of the second gradient buffer of a tied table, on a stage with embeddings and head
        (gradients.py)."""
        ends = {EMBEDDINGS, HEAD}
        # One chunk adds both uses into one buffer. With two chunks, or pieces, the order of the sums would depend on
        # messages and round differently.
        parted = len(self.chunks) > 1 or config.layout.data.in_pieces
        tied = [each for each in self.parameters if ends <= set(each.parts)] if parted else []
        return sum(each.gradient_bytes(config) for each in tied)


def compose_stages(config: Config, recordings: Recordings, partition: Sequence[int]) -> list[StagePlan]:
    """Compose every stage of a layout. `partition`: layers of each position; a position's input is the output of the
    one before."""
    outline, placement = recordings.outline(config), placement_of(config)
    parameters: list[dict[str, Parameter]] = [{} for _ in range(placement.num_stages)]
    plans: list[ChunkPlan] = []
    forms: Forms = ()
    for position, whole in enumerate(chunks_of(partition)):
        stage, incoming = placement.stage_of[position], forms
        units: list[Unit] = []
        parts = [(config, Chunk(range(0), True, False))] if whole.first else []
        parts += [
            (segment_config, Chunk(group, False, False)) for segment_config, group in _groups(config, whole.layers)
        ]
        parts += [(config, Chunk(range(0), False, True))] if whole.last else []
        for segment_config, chunk in parts:
            unit = _unit(segment_config, recordings, chunk, forms)
            forms = unit.recording.outgoing
            units.append(unit)
            chunk_index = position // placement.num_stages
            for parameter in unit.parameters:
                before = parameters[stage].get(parameter.name)
                parameters[stage][parameter.name] = used(parameter, before, chunk, chunk_index)
        plan = ChunkPlan(tuple(units), incoming, () if whole.last else forms)
        if plans and placement.stage_of[position - 1] == stage:
            # In a V placement one stage holds both middle positions: no message is sent.
            plan = replace(plan, handed_bytes=plans[-1].units[-1].recording.output_bytes)
            plans[-1] = replace(plans[-1], hands_on=True)
        plans.append(plan)
    return [
        StagePlan(
            tuple(plans[position] for position in placement.positions[stage]),
            # Buckets are filled in the model's order, whatever the order of a stage's chunks.
            tuple(sorted(held.values(), key=lambda parameter: outline.order[parameter.name])),
        )
        for stage, held in enumerate(parameters)
    ]


def _groups(config: Config, layers: Sequence[int]) -> Iterator[tuple[Config, Sequence[int]]]:
    """Yield the layers that are recorded together, each group with the config of its activation policy."""
    policy = config.memory.policy
    alone = replaced(config, FIELD, KEEPS_ALL, *COUNTS) if policy.by_groups else config
    for group in policy.groups(config, layers):
        if group.wrapped:
            yield config, group.layers
        else:
            yield from ((alone, group.layers[index : index + 1]) for index in range(len(group.layers)))


def used(parameter: Parameter, before: Parameter | None, chunk: Chunk, chunk_index: int) -> Parameter:
    """Return the parameter with one more part of the stage in its list of users.

    Args:
        parameter: The parameter.
        before: The same parameter with its earlier users; None: this is the first.
        chunk: The part that uses the parameter.
        chunk_index: The index of the stage's chunk with this part.
    """
    layer, _ = split_name(parameter.name)
    segment = layer if layer is not None else EMBEDDINGS if chunk.first else HEAD
    parts, parts_back = (before.parts, before.parts_back) if before else ((), ())
    back = (segment,) if parameter.read_back else ()
    chunks = tuple(sorted({*(before.chunks if before else ()), chunk_index}))
    return replace(parameter, parts=(*parts, segment), parts_back=(*parts_back, *back), chunks=chunks)


def _unit(config: Config, recordings: Recordings, chunk: Chunk, incoming: Forms) -> Unit:
    """Return the unit of a chunk's part: recorded whole if small, else extrapolated from recordings of two layers and
    one."""
    count, layers = len(chunk.layers), chunk.layers
    alike, whole = {recordings.outline(config).alike[layer] for layer in layers}, partial(recordings.of, config, chunk)
    # A group of different layers does not grow by one layer's share, so the group is recorded whole.
    if count <= 2 or len(alike) > 1:
        recording = whole(incoming)
        return Unit(recording, recording.parameters, partial(whole, incoming))
    # Each layer is recorded once, since names of parameters differ; equal layers share one program.
    ones = [recordings.of(config, Chunk(range(layer, layer + 1), False, False), incoming) for layer in layers]
    two = recordings.of(config, Chunk(layers[:2], False, False), incoming)
    parameters = tuple(parameter for recording in ones for parameter in recording.parameters)
    return Unit(two, parameters, partial(whole, incoming), ones[0], count)


class Composition:
    """A resolved run's stages and buckets of gradients.

    Attributes:
        placement: The stage of each chunk.
        like: For each stage, the first stage with equal tasks and parameters.
        buckets: The buckets of the stages in `like`; `known` gives buckets that are planned already.
        tied: Names of the parameters on two stages.
        kinds: The kinds of tasks.
        peers: The axes over the ranks of a stage.
    """

    def __init__(
        self,
        config: Config,
        stages: list[StagePlan],
        buckets: Buckets,
        known: dict[int, list[PlannedBucket]] | None = None,
    ) -> None:
        self.config, self.stages = config, stages
        self._buckets, self._known = buckets, known
        self.grid, self.placement = config.grid, placement_of(config)
        self.tasks = self.placement
        """The placement whose numbers tasks have as their chunk."""
        if config.layout.data.in_pieces and all(stage.chunks for stage in stages):  # an estimate's ending has no tasks
            positions = map(self.chunk, range(self.placement.num_positions))
            layers = [sum(len(unit_layers(unit)) for unit in chunk.units) for chunk in positions]
            self.tasks = piece_placement_of(config, layers)
        self.kinds = (TaskKind.FORWARD, TaskKind.BACKWARD, *([TaskKind.WEIGHT] if rule_of(config).splits else []))
        self.peers = "+".join(name for name in self.grid.names if name in config.layout.peer_axes)
        alone = len(stages) == 1 and not config.layout.data.in_pieces
        several = self.grid.size(*(self.peers.split("+") if self.peers else ())) > 1
        self.agrees = several and not alone and not rule_of(config).fixed
        """Whether a stage's ranks must agree on each task (pipeline.agreed)."""
        places = [place(index, config.num_microbatches) for index in range(config.num_microbatches)]
        self.counts = [places.count(which) for which in range(max(places) + 1)]
        """The number of microbatches at each place of the step."""
        origin = dict.fromkeys(self.grid.names, 0)
        self.ranks = [self.grid.rank(origin | {PIPE: stage}) for stage in range(len(stages))]
        """The first rank of each stage."""
        names = [{parameter.name for parameter in stage.parameters} for stage in stages]
        # Embeddings and head at the two ends: a single stage adds both gradients locally and sends none.
        self.tied = tied = frozenset(names[0] & names[-1] if len(stages) > 1 else ())
        # Stages of equal work run the same recordings as often, and share the answer to "holds a tied parameter".
        # Costs, buckets and memory are computed once for them, since most stages of a long pipeline are equal.
        first: dict[Hashable, int] = {}
        self.like = []
        for stage, plan in enumerate(stages):
            work = tuple(
                tuple((id(unit.recording.programs), unit.layers) for unit in chunk.units) for chunk in plan.chunks
            )
            shared = any(parameter.name in tied for parameter in plan.parameters)
            self.like.append(first.setdefault((work, shared), stage))
        positions_of = self.placement.positions
        self.alike = {
            position: first_position
            for stage, like in enumerate(self.like)
            for position, first_position in zip(positions_of[stage], positions_of[like], strict=True)
        }
        """By position of the chain the first one with an equal chunk."""

    @cached_property
    def buckets(self) -> dict[int, list[PlannedBucket]]:
        """The buckets of the stages in `like`."""
        return self._known or {
            stage: self._buckets.of(
                self.config, self.ranks[stage], HeldParameters(self.stages[stage].parameters, self.tied)
            )
            for stage in dict.fromkeys(self.like)
        }

    def chunk(self, position: int) -> ChunkPlan:
        """The chunk at a position of the chain."""
        return self.stages[self.placement.stage_of[position]].chunks[position // self.placement.num_stages]

    def traffic(self, stage: int) -> Sent:
        """Return the ledger of the stage's first rank: collectives, messages, agreements, sums of gradients."""
        total: Sent = {}
        for sending in self.sendings(stage):
            for key, entry in sending.program.traffic.items():
                # Traffic is mutable and shared by recordings: copies are added.
                total.setdefault(key, Traffic()).include(entry.scaled(sending.times))
        return total

    def sendings(self, stage: int) -> Iterator[Sending]:
        """Yield the items of the ledger in `traffic`."""
        yield from self._passes(stage, CATEGORIES, self.kinds, self.tasks)
        buckets = self.buckets[self.like[stage]]
        for places_gathered, times in zip(self.gathers(self.like[stage]), self.counts, strict=True):
            for (task_kind, _), gathered in places_gathered.items():
                for index in gathered:
                    yield Sending(f"gather for {CATEGORIES[task_kind]}", BUCKETS, buckets[index].gather, times)
        if self.config.model.routing.counts_first:
            yield from self._passes(stage, {TaskKind.FORWARD: COUNTING}, (TaskKind.FORWARD,), self.placement)
            for index, times in self.counting_gathers(stage).items():
                yield Sending(f"gather for {COUNTING}", BUCKETS, buckets[index].gather, times)
            yield Sending(COUNTING, "experts' loads", self.loads(stage))
        for bucket in buckets:
            # A bucket with late gradients keeps whole gradients, and is summed once at the step's end.
            sums = self.config.num_microbatches if bucket.slices and not bucket.waits else 1
            yield Sending("sum of gradients", BUCKETS, bucket.reduce, sums)
            yield Sending("new weights", BUCKETS, bucket.publish)
            yield Sending("sum of gradients", BUCKETS, bucket.across)

    def _passes(
        self, stage: int, names: Mapping[TaskKind, str], kinds: Sequence[TaskKind], tasks: ChunkPlacement
    ) -> Iterator[Sending]:
        """Yield the sendings of all microbatches' tasks of these kinds. `tasks`: the placement that numbers them."""
        chunks, count = self.stages[stage].chunks, self.config.num_microbatches
        for which, times in enumerate(self.counts):
            for task_kind, chunk in product(kinds, chunks):
                for unit in chunk.units:
                    begins = stage == 0 and unit is chunks[0].units[0]
                    segment = "layers" if unit_layers(unit) else "embeddings" if begins else "head"
                    for program, passes in unit.passes(task_kind, which):
                        yield Sending(names[task_kind], segment, program, times * passes)
        ledger, messages = Ledger(), self.messages(stage, back=TaskKind.BACKWARD in kinds)
        # Messages are equal in all microbatches: one is recorded, and counted `count` times.
        with ledger.repeated(count):
            for neighbour, side in sides_of(stage, self.placement).items():
                for size in messages[side]:
                    ledger.record(PIPE, MESSAGE, size, neighbour - stage)
        yield Sending("between stages", "activations and their gradients", Program(traffic=ledger.traffic))
        if self.agrees:
            ledger = Ledger()
            with ledger.repeated(count * len(kinds) * sum(map(len, tasks.numbers[stage]))):
                # The stage's first rank broadcasts the next task to its peers in 8 bytes.
                ledger.record(self.peers, "broadcast", 8 * (self.grid.size(*self.peers.split("+")) - 1), 0)
            yield Sending("between stages", "which task is next", Program(traffic=ledger.traffic))

    def loads(self, stage: int) -> Program:
        """Return the program that sums the loads counted by a stage's routers, for a balance over the batch."""
        names = [parameter.name for parameter in self.stages[stage].parameters]
        routers = sum(name.endswith("router.weight") for name in names)
        return loads_program(self.config, self.ranks[stage], routers) if routers else Program()

    def counting_gathers(self, stage: int) -> Counter[int]:
        """Return the number of times that the pass counting experts' loads gathers each bucket; the head's stay
        gathered (whole_weights)."""
        if not self.config.layout.data.strategy.gathers:
            return Counter()
        buckets = self.buckets[self.like[stage]]
        walk, chunks = walk_through(buckets, self.groups(stage))
        head = {index for index, bucket in enumerate(buckets) if max(chunks[-1].parts) in bucket.kind.parts}
        gathered = Counter(head)
        for _ in range(self.config.num_microbatches):
            for chunk in chunks:
                walk.begin()
                gathered.update(
                    index for segment in chunk.parts for index in walk.forward(segment).sent if index not in head
                )
        return gathered

    def messages(self, stage: int, *, back: bool = True) -> dict[Side, list[int]]:
        """Return the bytes of a microbatch's messages to each side: activations and, with `back`, gradients."""
        passing = [self.chunk(position).outgoing for position in range(self.placement.num_positions - 1)]
        forms = message_forms(stage, self.placement, passing)
        return {
            side: [bytes_of(cut.tensors) for cut in cuts.values() if back or not cut.inward]
            for side, cuts in forms.items()
        }

    @remembered()
    def gathers(self, stage: int) -> list[Gathered]:
        """Return the buckets gathered by the tasks of a stage in `like`, for each place in the step
        (data_parallel/gathering.py)."""
        if not self.config.layout.data.strategy.gathers:
            return [{} for _ in self.counts]
        groups = self.groups(stage)
        chunks = [[layer for unit in chunk for layer in unit] for chunk in groups]
        every = (group for layers in chunks for group in self.config.memory.policy.groups(self.config, layers))
        again = {layer for group in every if group.wrapped for layer in group.layers}
        # A part finds the weights that the part before has gathered, so the walk depends on the order of parts.
        return gathered_buckets(self.buckets[stage], groups, len(self.counts), again)

    def groups(self, stage: int) -> list[list[list[int]]]:
        """Return the layers of each unit of each chunk of a stage, in the order of the forward pass."""
        return [[unit_layers(unit) for unit in chunk.units] for chunk in self.stages[stage].chunks]

    @property
    def most_flops(self) -> float:
        """Floating-point operations of the busiest rank's products in a step."""
        # The busiest stage sets the pace; equal stages are computed once.
        again = [TaskKind.FORWARD] * self.config.model.routing.counts_first
        return max(
            sum(times * chunk.cost(task_kind, which).flops
                for which, times in enumerate(self.counts)
                for task_kind, chunk in product((*self.kinds, *again), self.stages[stage].chunks))
            for stage in dict.fromkeys(self.like)
        )  # fmt: skip


def unit_layers(unit: Unit) -> list[int]:
    """Return the numbers of a unit's layers; empty at an end of the chain."""
    layers = {split_name(parameter.name)[0] for parameter in unit.parameters}
    return sorted(layer for layer in layers if layer is not None)


def gathered_buckets(
    buckets: Sequence[PlannedBucket], groups: Sequence[Sequence[Sequence[int]]], places: int, again: Collection[int]
) -> list[Gathered]:
    """Return the buckets gathered by the tasks at each place: the run's own walk, one microbatch after the other.

    Args:
        buckets: The stage's buckets.
        groups: The layers, as `Composition.groups` returns.
        places: The number of places in the step.
        again: Layers that are recomputed in the backward pass.
    """
    walk, chunks = walk_through(buckets, groups)
    places_gathered: list[Gathered] = []
    for _ in range(places):
        gathered: dict[tuple[TaskKind, int], list[int]] = {}
        for chunk_index, chunk in enumerate(chunks):
            walk.begin()
            gathered[TaskKind.FORWARD, chunk_index] = [
                index for segment in chunk.parts for index in walk.forward(segment).sent
            ]
        for chunk_index, chunk in reversed(list(enumerate(chunks))):
            backward = gathered[TaskKind.BACKWARD, chunk_index] = []
            units = [list(group) for group in groups[chunk_index] if group]
            ends = [EMBEDDINGS] * chunk.first, [HEAD] * chunk.last
            for group in filter(None, (ends[1], *reversed(units), ends[0])):
                # The backward pass starts at a group's last layer; a recomputed group then reads its weights forward
                # once more.
                backward += walk.backward(group[-1]).sent
                if group in units and group[0] in again:
                    backward += [index for segment in group for index in walk.forward(segment).sent]
                for segment in reversed(group[:-1]):
                    backward += walk.backward(segment).sent
        places_gathered.append(gathered)
    return places_gathered


def walk_through(
    buckets: Sequence[PlannedBucket], groups: Sequence[Sequence[Sequence[int]]]
) -> tuple[Walk, list[Chunk]]:
    """Return the run's own bookkeeping of gathered weights at a step's beginning, and a stage's chunks."""
    parts = sorted({segment for bucket in buckets for segment in bucket.kind.parts})
    of = {segment: [index for index, bucket in enumerate(buckets) if segment in bucket.kind.parts] for segment in parts}
    reread = {
        segment: {index for index in of[segment] if segment in buckets[index].parts_back}
        for segment in (EMBEDDINGS, HEAD)
        if segment in of
    }
    layers = [tuple(layer for group in chunk for layer in group) for chunk in groups]
    last = len(groups) - 1
    chunks = [
        Chunk(chunk_layers, chunk_index == 0 and EMBEDDINGS in of, chunk_index == last and HEAD in of)
        for chunk_index, chunk_layers in enumerate(layers)
    ]
    # The run's own class (data_parallel/gathering.py), so planned and real gathers cannot differ.
    return Walk(of, reread, chunks), chunks
