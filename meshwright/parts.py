"""The parts of a run, built for one rank from its config.

First every stage's chunks are built on the meta device, so that each rank knows all parameters and the messages between
stages; then this rank's chunks, with the strategies that the config names (registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from meshwright.config import Config
from meshwright.context.context import WHOLE_SEQUENCES, Context
from meshwright.data_parallel.strategy import Synchroniser
from meshwright.machine import available_memory_bytes
from meshwright.memory.offload import Offloaded
from meshwright.memory.recompute import best_group, groups_of, recomputed
from meshwright.model import EMBEDDINGS, HEAD, Batch, Chunk, Hidden, Model, rows_of
from meshwright.models.attention import AttentionCore
from meshwright.models.chain import Chain, ChainPart, chain_of, first_trained, make_chain
from meshwright.models.spread_head import SpreadHead
from meshwright.optim.optimizer import Optimizer, StoredState
from meshwright.optim.states import InPlace, StatesFactory
from meshwright.parameters.bucket import Slot, make_buckets
from meshwright.parameters.gradients import Gradients
from meshwright.parameters.shard import ShardSpec, draw_values, initialise, shard_specs, use_gradients
from meshwright.pipeline.partition import ranges_of
from meshwright.pipeline.pieces import Exchanges, PieceStage, PiecewiseChunks
from meshwright.pipeline.pipeline import Pipeline, message_forms
from meshwright.pipeline.placement import ChunkPlacement
from meshwright.pipeline.schedule import MESSAGE_DRIVEN, ONE_F_ONE_B, ScheduleRule
from meshwright.pipeline.stage import Computing, Portions, Stage
from meshwright.ranks.grid import EXPERT, PIPE
from meshwright.ranks.mailbox import MessageMeta, TensorMeta
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.registry import load_entry
from meshwright.tensor.islands import UsesIslands, compiled_islands
from meshwright.tensor.kit import Kit
from meshwright.tensor.linear import autocast_device
from meshwright.tensor.widened import WidenedProducts

if TYPE_CHECKING:
    from meshwright.parameters.fixed import FixedPoint

LAYOUT_FREE = "meshwright.bits.assembly:layout_free"
EXACT_ARITHMETIC, EXACT_HEADS = "meshwright.bits.assembly:arithmetic_of", "meshwright.bits.assembly:heads_of"
"""Entries of the room of equal bits, which a run without `bits: layout-free` does not import."""

ALONE_IN_FLIGHT = 2
"""Microbatches in flight without pipeline stages where rows travel to experts under another microbatch's tasks."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


STATES: dict[str, Callable[[Mesh, Path], StatesFactory]] = {
    "none": lambda mesh, folder: InPlace,
    "host": lambda mesh, folder: partial(
        Offloaded, device=mesh.device, place=available_memory_bytes() // mesh.ranks_here
    ),
    "disk": lambda mesh, folder: partial(Offloaded, device=mesh.device, place=folder / f"offload-{mesh.rank}.bin"),
}


@dataclass(frozen=True)
class Stages:
    """All stages of a pipeline, as every rank knows them.

    `chunks`: by position in the chain. `specs`: of the whole model's parameters; `tied`: names of tables that the first
    and the last stage hold, as embedding and as head. `passing`: the tensors from position i to i + 1. `states`: the
    hidden states that a head cut over stages reads.
    """

    chunks: tuple[Chunk, ...]
    specs: dict[str, ShardSpec]
    passing: tuple[tuple[TensorMeta, ...], ...]
    placement: ChunkPlacement
    states: TensorMeta | None = None

    def of(self, stage: int) -> tuple[Chunk, ...]:
        """A stage's chunks."""
        return tuple(self.chunks[position] for position in self.placement.positions[stage])

    def ends(self, position: int) -> tuple[tuple[TensorMeta, ...], tuple[TensorMeta, ...]]:
        """(Tensors that a position receives, tensors that it sends)."""
        passing = ((), *self.passing, ())
        return passing[position], passing[position + 1]

    def message(self, stage: int) -> MessageMeta:
        """The tensors between a stage and its neighbours."""
        return message_forms(stage, self.placement, self.passing)


@dataclass(frozen=True)
class Parts:
    """One rank's model, strategy, pipeline and optimizer, and what they share."""

    config: Config
    """The run's config, without `auto` (decisions.py)."""
    mesh: Mesh
    kit: Kit
    model: Chain
    """This stage's chunks of the model."""
    stages: Stages
    strategy: Synchroniser
    pipeline: Pipeline
    optimizer: Optimizer
    portions: Portions | None = None
    """The portions in which a microbatch is computed (`bits: layout-free`); None: at once."""

    @property
    def specs(self) -> dict[str, ShardSpec]:
        """The specs of all stages' parameters."""
        return self.stages.specs

    def stored(self) -> Iterator[tuple[Slot, list[StoredState]]]:
        """Yield the slots with their weights and states, as checkpoints hold them; then frozen weights."""
        for index, slot in enumerate(self.strategy.slots):
            yield slot, list(self.optimizer.stored(index))
        for slot in (one.slot for one in self.strategy.frozen):
            yield slot, [StoredState("weight", slot.parameter.detach(), slot.places, slot.slices)]

    def microbatches(self, batch: Batch) -> list[Batch]:
        """This rank's part of each microbatch of a replica's batch."""
        micro = self.config.micro
        return [
            rank_part(rows_of(batch, slice(start, start + micro)), self.kit, self.model)
            for start in range(0, self.config.replica_batch, micro)
        ]


def build(config: Config, mesh: Mesh, folder: Path = Path()) -> Parts:
    """Build one rank's parts of a run. `config`: resolved; `folder`: the run's, for optimizer states on disk."""
    if mesh.device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if config.precision.tf32 else "ieee"
        use_flash_attention(mesh.device)
    # Every rank builds all stages on the meta device, to know all parameters, ties and messages without communication.
    stages = plan_stages(config, mesh)
    chunks = stages.of(mesh.index(PIPE))
    # Parameters stay on the meta device until buckets draw their values, so that no rank holds a model beside its
    # buckets. fully_shard needs real tensors.
    kit = build_kit(config, replace(mesh, empty=not config.layout.data.strategy.whole))
    model = build_model(config, kit, mesh, Chunk.union(chunks))
    recompute_in(config, model, chunks)
    if config.compile == "islands" and mesh.device.type != "meta":
        islands = compiled_islands()
        for module in model.modules():
            if isinstance(module, UsesIslands):
                module.islands = islands
    exact = load_entry(LAYOUT_FREE)(config, mesh, model.inside) if config.bits.layout_free else None
    fixed = None if exact is None else exact.fixed
    strategy = _build_strategy(config, mesh, model, stages.specs, chunks, fixed)
    # After the strategy, which made the buckets that layers write gradients into.
    use_gradients(model, strategy.gradients)
    if exact is not None:
        exact.apply(config, mesh, model, stages.specs)
    portions = None if exact is None else exact.portions
    to = config.memory.offload.to if mesh.device.type != "meta" else "none"  # a plan has nothing to keep
    optimizer = Optimizer(config, strategy.slots, mesh, STATES[to](mesh, folder), fixed)
    pipeline = build_pipeline(config, mesh, model, stages, strategy, portions)
    return Parts(config, mesh, kit, model, stages, strategy, pipeline, optimizer, portions)


def plan_stages(config: Config, mesh: Mesh) -> Stages:
    """Build every stage's chunks on the meta device, each as held by the rank with this rank's other coordinates."""
    settings = config.layout.pipeline
    assert not isinstance(settings.partition, str) or settings.size == 1, "resolve() decides the partition beforehand"
    partition = settings.partition if not isinstance(settings.partition, str) else (config.model.num_blocks,)
    stages = Stages(chunks_of(partition, (PIPE,) if settings.head == "spread" else ()), {}, (), placement_of(config))
    specs: dict[str, ShardSpec] = {}
    models: list[tuple[Kit, Chain]] = []
    for stage in range(settings.size):
        # The rank of that stage with this rank's other coordinates, with which it exchanges messages.
        fellow = mesh.grid.rank(mesh.grid.coordinates(mesh.rank) | {PIPE: stage})
        there = planned_mesh(mesh.grid, fellow, mesh.token_axes)
        kit = build_kit(config, there)
        model = build_model(config, kit, there, Chunk.union(stages.of(stage)))
        model.groups = tuple(chunk.layers for chunk in stages.of(stage))
        for module in model.modules():
            if isinstance(module, AttentionCore):
                module.run = attended_form
        # A name of an earlier stage again: a tied table, or the head's table cut over stages.
        own = shard_specs(model).items()
        specs |= {name: replace(spec, tied=name in specs and PIPE not in spec.axes) for name, spec in own}
        models.append((kit, model))
    passing: list[tuple[TensorMeta, ...]] = []
    hidden: Hidden = ()
    rows = config.bits.samples * config.layout.tensor.rows.parts if config.bits.layout_free else config.micro
    for position, chunk in enumerate(stages.chunks if settings.head == "spread" else stages.chunks[:-1]):
        kit, model = models[stages.placement.stage_of[position]]
        with torch.no_grad():
            # A forward pass on meta tensors gives the shapes and dtypes of messages.
            hidden = model.hidden_states(empty_batch(config, kit, model, torch.device("meta"), rows), hidden, chunk)
        # A tensor for all samples is sent once by each portion.
        passing.append(tuple(TensorMeta((x.shape[0] * (config.micro // rows), *x.shape[1:]), x.dtype) for x in hidden))
    states = passing.pop()[0] if settings.head == "spread" else None
    return replace(stages, specs=specs, passing=tuple(passing), states=states)


def attended_form(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """The form of attention's result [B, A, T, E] on the meta device, by itself."""
    # Step by step in Python it took five sixths of the plan of stages where heads attend by runs.
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def placement_of(config: Config) -> ChunkPlacement:
    """Which stage has which chunks."""
    pipeline = config.layout.pipeline
    return ChunkPlacement(pipeline.size, pipeline.chunks if pipeline.size > 1 else 1, pipeline.placement)


def piece_placement_of(config: Config, partition: Sequence[int]) -> ChunkPlacement:
    """Which stage has which pieces where rows travel as messages: a layer with experts is cut twice."""
    whole = placement_of(config)
    layers = ranges_of(partition)
    pieces = tuple(1 + 2 * sum(config.model.has_experts(layer) for layer in own) for own in layers)
    return ChunkPlacement(whole.num_stages, whole.num_chunks, whole.shape, pieces)


def chunks_of(partition: Sequence[int], head_over: tuple[str, ...] = ()) -> tuple[Chunk, ...]:
    """The chunks of a chain by position. `partition`: layers in each; `head_over`: as in Chunk."""
    runs = ranges_of(partition)
    return tuple(Chunk(run, position == 0, position == len(runs) - 1, head_over) for position, run in enumerate(runs))


def build_kit(config: Config, mesh: Mesh) -> Kit:
    """This rank's kit, by which the model builds its layers."""
    arithmetic = load_entry(EXACT_ARITHMETIC)(config, mesh) if config.bits.layout_free else None
    return config.layout.tensor.kit(config, mesh, arithmetic)


def open_context(config: Config, mesh: Mesh) -> Context:
    """This rank's context: its tokens of each sequence, and how its attention reads the others'."""
    context = config.layout.context
    if context.size == 1 and not config.bits.cuts:
        return WHOLE_SEQUENCES
    strategy, exact = context.strategy, config.bits.cuts
    entry = strategy.layout_free if exact else strategy.context
    opened = Context() if context.size == 1 else cast(Context, load_entry(entry)(mesh))
    if exact:
        opened.heads = load_entry(EXACT_HEADS)(config, mesh)
    return opened


def build_model(config: Config, kit: Kit, mesh: Mesh, chunk: Chunk | None = None) -> Chain:
    """The model or a chunk of it, with this rank's part of the initial weights in their stored precision."""
    model = make_chain(config, kit, chunk)
    model.context = open_context(config, mesh)
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.context = model.context
    initialise(model, mesh, config.seed)
    specs = shard_specs(model)
    dtype = DTYPES[config.precision.dtype]
    level = config.precision.level
    sharded_masters = config.layout.data.strategy.whole  # its weights are the masters, and it casts what it gathers
    for name, parameter in model.named_parameters():
        stores_half = level == "O2" and specs[name].role.stored == "run" and not sharded_masters
        if level == "O0" or stores_half:
            parameter.data = parameter.data.to(dtype)
    return model


def rank_part(batch: Batch, kit: Kit, model: Chain) -> Batch:
    """A rank's rows of a replica's batch, of each entry those for where it is read; and its tokens of these rows."""
    entries, inside = model.prepared(batch).items(), model.inside
    rows = {name: kit.slice(x, "inside" if name in inside else "batch") for name, x in entries}
    return model.context.cut(rows, inside)


def empty_batch(config: Config, kit: Kit, model: Chain, device: torch.device, rows: int | None = None) -> Batch:
    """This rank's part of a batch of zeros. `samples`: their number; None: a microbatch's."""
    shapes, count = chain_of(config).sample_shapes(config), rows or config.micro
    zeros = {name: torch.zeros(count, *shape, dtype=torch.long, device=device) for name, shape in shapes.items()}
    return rank_part(zeros, kit, model)


def recompute_in(config: Config, model: Chain, chunks: Sequence[Chunk]) -> None:
    """Set which groups of the model's layers are recomputed. `chunks`: those of the model."""
    setting = config.memory.recompute
    model.groups = tuple(chunk.layers for chunk in chunks)
    if setting == "selective":
        for module in model.modules():
            if isinstance(module, AttentionCore):
                module.run = recomputed
    elif setting != "none":
        model.run_group = partial(recomputed, keeps=True) if setting == "ops" else recomputed
        model.keeps_rows = config.layout.data.in_pieces
        model.groups = tuple(
            group for chunk in chunks for group in groups_of(chunk.layers, recomputed_group(config, len(chunk.layers)))
        )


FLASH_ATTENTION = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""By major compute capability: torch's name of the FlashAttention written for it, and the package that has it."""


def use_flash_attention(device: torch.device) -> None:
    """Activate the FlashAttention written for this GPU where it is installed; else torch's FlashAttention 2 runs."""
    name, package = FLASH_ATTENTION.get(torch.cuda.get_device_capability(device)[0], ("", ""))
    parents = [package.rpartition(".")[0] or package, package]  # a part is looked for where the whole is there
    if package and torch.__version__ >= "2.13" and all(find_spec(part) is not None for part in parents):
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(name)


def recomputed_group(config: Config, stage_layers: int) -> int:
    """The number of layers recomputed together in a chunk of `stage_layers`."""
    setting = config.memory.recompute
    assert setting not in ("none", "selective"), f"memory.recompute={setting} has no groups"
    if setting == "ops" or config.layout.data.in_pieces:
        return 1
    return best_group(stage_layers, config.model.num_blocks) if setting == "auto" else int(setting)


def rule_of(config: Config) -> ScheduleRule:
    """The run's schedule with its limit of microbatches in flight. A lone stage has one, or ALONE_IN_FLIGHT where rows
    travel under another microbatch's tasks."""
    settings = config.layout.pipeline
    if settings.size == 1:
        return MESSAGE_DRIVEN.limited(ALONE_IN_FLIGHT) if config.layout.data.in_pieces else ONE_F_ONE_B
    rule = settings.rule
    return rule if settings.limit == "auto" else rule.limited(settings.limit)


def autocasts_of(config: Config, mesh: Mesh) -> tuple[str, torch.dtype] | None:
    """(Device type, dtype) of autocast under O1; else None."""
    return (autocast_device(mesh.device), DTYPES[config.precision.dtype]) if config.precision.level == "O1" else None


def multiplies_in(config: Config) -> Computing:
    """The context manager in which a stage computes, by which CPUs multiply half precision (precision.products)."""
    return WidenedProducts if config.precision.products == "float32" else nullcontext


def build_pipeline(
    config: Config, mesh: Mesh, model: Chain, stages: Stages, strategy: Synchroniser, portions: Portions | None = None
) -> Pipeline:
    """The stage's chunks with their schedule, mailboxes and context."""
    index, placement = mesh.index(PIPE), stages.placement
    chunks = stages.of(index)
    there = planned_mesh(mesh.grid, mesh.rank, mesh.token_axes)
    models: Sequence[Model] = [model] if len(chunks) == 1 else [ChainPart(model, chunk) for chunk in chunks]
    own = [
        Stage(
            part,
            strategy.gradients,
            run=strategy.forward,
            autocasts=autocasts_of(config, mesh),
            multiplies=multiplies_in(config),
            number=number,
            portions=portions,
            learns=not config.model.frozen or first_trained(config, build_kit(config, there)) < part.chunk.parts[0],
        )
        for number, part in enumerate(models)
    ]
    data = config.layout.data
    piecewise = None
    if data.in_pieces and mesh.device.type != "meta":
        in_pieces = piece_placement_of(config, [len(chunk.layers) for chunk in stages.chunks])
        whole = zip(own, in_pieces.numbers[index], strict=True)
        pieces = [PieceStage(stage, numbers[0]) for stage, numbers in whole]
        piecewise = PiecewiseChunks(pieces, in_pieces, Exchanges(mesh.comm(EXPERT)))
    elif stages.states is not None and mesh.device.type != "meta":
        piecewise = _with_spread_head(own[0], model, stages, stages.states, mesh)
    # In a v one rank has the first and the last chunk; message timing decides which adds to a tied table first.
    _share_tables(strategy.gradients, model, config, mesh, placement if piecewise is None else piecewise.placement)
    peers = mesh.comm(*(config.layout.peer_axes if config.layout.pipeline.size > 1 or data.in_pieces else ()))
    mailbox, forms = mesh.mailbox(PIPE, ring=placement.is_ring), stages.message(index)
    return Pipeline(own, rule_of(config), mesh, peers, mailbox, forms, strategy, placement, piecewise)


def _with_spread_head(whole: Stage, model: Chain, stages: Stages, states: TensorMeta, mesh: Mesh) -> PiecewiseChunks:
    """A stage with its part of a head that is cut over stages. `whole`: the stage that evaluations run."""
    placement, index = ChunkPlacement(stages.placement.num_stages, spreads_head=True), mesh.index(PIPE)
    last, make = index == placement.last_stage, partial(SpreadHead, model, placement.num_stages)
    like = torch.empty(states.shape, dtype=states.dtype, device="meta")
    parts = [make(like, layers=True, head=last), *([] if last else [make(like, layers=False, head=True)])]
    pieces = [
        PieceStage(
            Stage(part, whole.gradients, autocasts=whole.autocasts, multiplies=whole.multiplies, number=number),
            numbers[0],
        )
        for number, (part, numbers) in enumerate(zip(parts, placement.numbers[index], strict=True))
    ]
    return PiecewiseChunks(pieces, placement, Exchanges(mesh.comm(PIPE)), states)


def _share_tables(
    gradients: Gradients, model: Chain, config: Config, mesh: Mesh, placement: ChunkPlacement
) -> None:  # fmt: skip
    """Give the two chunks of a stage that use one tied table separate memory for its gradients, summed at the end."""
    last = placement.numbers[mesh.index(PIPE)][-1][-1]
    if last == 0 or not (model.chunk.first and model.chunk.last):
        return
    there = planned_mesh(mesh.grid, mesh.rank, mesh.token_axes)
    ends = (Chunk(range(0), True, False), Chunk(range(0), False, True))
    of_ends = [shard_specs(build_model(config, build_kit(config, there), there, end)) for end in ends]
    for name, parameter in model.named_parameters():
        if all(name in specs for specs in of_ends) and parameter.requires_grad:
            gradients.share(parameter, (0, last))


def bucket_bytes(config: Config) -> int:
    """Bytes of a bucket. Under offload that of the optimizer's chunk, which is stepped while the next one is summed."""
    offload = config.memory.offload
    if offload.to == "none":
        return config.layout.data.bucket
    return offload.chunk * offload.bucket * DTYPES[config.precision.dtype].itemsize


def _build_strategy(
    config: Config,
    mesh: Mesh,
    model: Chain,
    specs: dict[str, ShardSpec],
    chunks: Sequence[Chunk],
    fixed: FixedPoint | None,
) -> Synchroniser:
    sync = config.layout.data.strategy
    if sync.whole:
        half = DTYPES[config.precision.dtype] if config.precision.level == "O2" else None
        units = list(model.blocks.children())
        return cast(
            Synchroniser, load_entry(sync.whole)(model, units, specs, mesh, half, widens=config.widens_gradients)
        )
    policy = load_entry(sync.policy)()
    using = {} if policy.owners == "all" else parts_using(config, mesh, model.chunk)
    parts = using if sync.gathers else None
    own = {
        name: tuple(number for number, chunk in enumerate(chunks) if not set(users).isdisjoint(chunk.parts))
        for name, users in using.items()
    }
    # A sliced bucket leaves when its chunk is done; one of two chunks would wait for the later chunk.
    by_chunk = own if sync.slices and len(chunks) > 1 else None

    def fill(name: str, out: Tensor) -> nn.Parameter:
        draw_values(out, name, specs[name], mesh, config.seed)
        parameter = nn.Parameter(out.new_empty(0), requires_grad=specs[name].role.rule.trained)
        parameter.data = out
        owner, _, own = name.rpartition(".")
        # Set by name: a meta tensor cannot get memory in place (swap_tensors fails under FakeTensorMode).
        setattr(model.get_submodule(owner), own, parameter)
        return parameter

    buckets = make_buckets(
        model.named_parameters(), specs, mesh, bucket_bytes(config), parts, by_chunk,
        rule_of=config.optimizer.update.rule_of, dealt_over=policy.dealt_over(mesh), widens=config.widens_gradients,
        exact=fixed is not None, shares=sync.over_mpi, fill=None if mesh.device.type == "meta" else fill,
    )  # fmt: skip
    strategy = load_entry(sync.synchroniser)(buckets, mesh, policy, fixed)
    if policy.owners != "all":
        strategy.follow(model, using, chunks)
    return cast(Synchroniser, strategy)


def parts_using(config: Config, mesh: Mesh, chunk: Chunk) -> dict[str, tuple[int, ...]]:
    """By parameter, the numbers of the chunk's parts that use it."""
    there = planned_mesh(mesh.grid, mesh.rank, mesh.token_axes)
    kit = build_kit(config, there)
    runs = [(EMBEDDINGS, Chunk(range(0), True, False))] if chunk.first else []
    runs += [(layer, Chunk(range(layer, layer + 1), False, False)) for layer in chunk.layers]
    runs += [(HEAD, Chunk(range(0), False, chunk.last, chunk.head_over))] if chunk.has_head else []
    using: dict[str, tuple[int, ...]] = {}
    for part, alone in runs:
        for name, _ in make_chain(config, kit, alone).named_parameters():
            using[name] = (*using.get(name, ()), part)
    return using
