"""The parts of a run, built for one rank from its config.

First every stage's chunks are built on the meta device: each rank then knows all parameters and the messages between
stages. Then this rank's chunks are built, with the strategies that the config names (registry.py). `build` applies
these passes in order:

| pass                    | gives a model                                             | if                      |
|-------------------------|-----------------------------------------------------------|-------------------------|
| context.open            | the tokens of other ranks, in attention                   | always, with the values |
| memory.apply_policy     | groups of layers that a backward pass runs again          | memory.recompute        |
| COMPILERS               | compiled layers, or functions                             | compile: blocks, ...    |
| data_parallel.assembly  | parameters in buckets; parts that wait for new values     | always                  |
| parameters.shard        | one `Gradients` that all layers add to                    | always                  |
| bits.assembly           | masks and losses that no layout changes                   | bits: layout-free       |

Later passes wrap earlier ones: equal bits seed the parts of the chain that a strategy runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from meshwright.compute import precision
from meshwright.compute.model import EMBEDDINGS, Batch, Chunk, Model, rows_of
from meshwright.compute.models.chain import Chain, ChainPart, first_trained
from meshwright.compute.models.spread_head import with_spread_head
from meshwright.compute.parameters.bucket import Slot
from meshwright.compute.parameters.shard import ShardSpec, use_gradients
from meshwright.compute.tensor.kit import Kit
from meshwright.compute.tensor.linear import autocasts_of
from meshwright.config import Config
from meshwright.config.registry import load_entry
from meshwright.ranks.grid import PIPE
from meshwright.ranks.machine import available_memory_bytes
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.data_parallel.assembly import build_strategy
from meshwright.strategies.data_parallel.strategy import Synchroniser
from meshwright.strategies.memory.activations import apply_policy
from meshwright.strategies.memory.offload import Offloaded
from meshwright.strategies.optim.optimizer import Optimizer, StoredState
from meshwright.strategies.optim.states import InPlace, StatesFactory
from meshwright.strategies.pipeline.assembly import build_pipeline
from meshwright.strategies.pipeline.pipeline import Pipeline
from meshwright.strategies.pipeline.stage import Portions, Stage
from meshwright.strategies.pipeline.stages import Stages
from meshwright.training.all_stages import plan_stages
from meshwright.training.rank_model import build_kit, build_model, parts_using, rank_part, tables_of_both_ends

LAYOUT_FREE = "meshwright.compute.bits.assembly:layout_free"
"""The entry of the room of equal bits, imported only by runs with `bits: layout-free`."""

BLOCKS = "meshwright.compute.models.compiled:apply"
COMPILERS = {"kernels": BLOCKS, "blocks": BLOCKS, "islands": "meshwright.compute.tensor.islands:apply"}
"""The entries of compiled code, by `compile`. They load torch's compiler, which takes 2 s a rank."""

STATES: dict[str, Callable[[Mesh, Path], StatesFactory]] = {
    "none": lambda mesh, folder: InPlace,
    "host": lambda mesh, folder: partial(
        Offloaded, device=mesh.device, storage=available_memory_bytes() // mesh.ranks_here
    ),
    "disk": lambda mesh, folder: partial(Offloaded, device=mesh.device, storage=folder / f"offload-{mesh.rank}.bin"),
}


@dataclass(frozen=True)
class Parts:
    """One rank's model, strategy, pipeline and optimizer."""

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
    """The portions of a microbatch that are computed one by one (`bits: layout-free`); None: the whole at once."""

    @property
    def specs(self) -> dict[str, ShardSpec]:
        """Return the specs of all stages' parameters."""
        return self.stages.specs

    def stored(self) -> Iterator[tuple[Slot, list[StoredState]]]:
        """Yield each slot with its weights and states, as stored in checkpoints; then frozen weights."""
        for index, slot in enumerate(self.strategy.slots):
            yield slot, list(self.optimizer.stored(index))
        for slot in (bucket_sum.slot for bucket_sum in self.strategy.frozen):
            yield slot, [StoredState("weight", slot.parameter.detach(), slot.places, slot.slices)]

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Slice a replica's batch into this rank's part of each microbatch."""
        micro = self.config.micro
        return [
            rank_part(rows_of(batch, slice(start, start + micro)), self.kit, self.model)
            for start in range(0, self.config.replica_batch, micro)
        ]


def build(config: Config, mesh: Mesh, folder: Path = Path(), *, drawn: bool = True) -> Parts:
    """Build one rank's parts of a run.

    Args:
        config: the resolved config.
        mesh: this rank's mesh.
        folder: the run's folder, for optimizer states on disk.
        drawn: draw initial values; False if a checkpoint's values follow (checkpoint/restore.py).
    """
    precision.choose_kernels(config, mesh.device)
    stages = plan_stages(config, mesh)
    chunks = stages.of(mesh.index(PIPE))
    planned = mesh.device.type == "meta"
    # Parameters stay on the meta device until buckets draw initial values: no rank holds a model in addition to its
    # buckets.
    kit = build_kit(config, replace(mesh, empty=True))
    model = build_model(config, kit, mesh, Chunk.union(chunks))
    apply_policy(config, mesh, model, chunks)
    if config.compile in COMPILERS and not planned:
        load_entry(COMPILERS[config.compile])(config, model)
    exact = load_entry(LAYOUT_FREE)(config, mesh, model.inside) if config.bits.layout_free else None
    fixed, portions = (None, None) if exact is None else (exact.fixed, exact.portions)
    using = partial(parts_using, config, mesh, model.chunk)
    strategy = build_strategy(config, mesh, model, stages.specs, chunks, using, fixed, drawn=drawn)
    # After the strategy, since layers write gradients into the strategy's buckets.
    use_gradients(model, strategy.gradients)
    if exact is not None:
        exact.apply(config, mesh, model, stages.specs)
    states = STATES["none" if planned else config.memory.offload.to]  # a plan has no states to store
    optimizer = Optimizer(config, strategy.slots, mesh, states(mesh, folder), fixed)
    models: Sequence[Model] = [model] if len(chunks) == 1 else [ChainPart(model, chunk) for chunk in chunks]
    there = planned_mesh(mesh.grid, mesh.rank, mesh.token_axes)
    pipeline = build_pipeline(
        config, mesh, models, stages, strategy, partial(Stage, autocasts=autocasts_of(config, mesh)),
        portions=portions,
        begins=first_trained(config, build_kit(config, there)) if config.model.freezes else EMBEDDINGS,
        heads=spread_heads(model, stages, mesh),
        tables=partial(tables_of_both_ends, config, mesh, model),
    )  # fmt: skip
    return Parts(config, mesh, kit, model, stages, strategy, pipeline, optimizer, portions)


def spread_heads(model: Chain, stages: Stages, mesh: Mesh) -> Sequence[Model]:
    """Return the models that this stage runs in turn if the head is cut over stages; empty otherwise, and in a plan."""
    if stages.states is None or mesh.device.type == "meta":
        return ()
    like = torch.empty(stages.states.shape, dtype=stages.states.dtype, device="meta")
    placement = stages.placement
    return with_spread_head(model, placement.num_stages, like, last=mesh.index(PIPE) == placement.last_stage)
