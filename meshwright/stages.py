"""What each stage of a pipeline holds of a model, and what passes between stages, found out without numbers.

All stages are built on the meta device, so that every rank knows the whole model's parameters, and which of them two
stages hold: tied embeddings, on the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.config import Config
from meshwright.model import Batch, Chunk, Hidden
from meshwright.models.chain import Chain, chain_of
from meshwright.parameters.shard import ShardSpec, shard_specs
from meshwright.pipeline.partition import ranges_of
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import MessageMeta, TensorMeta
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.tensor.kit import Kit, rows_of_rank

MakeModel = Callable[[Mesh, Chunk], tuple[Chain, Kit]]


@dataclass(frozen=True)
class Stages:
    """`specs`: of all parameters of the whole model. `passing`: forms of what stage i gives to stage i + 1."""

    chunks: tuple[Chunk, ...]
    specs: dict[str, ShardSpec]
    passing: tuple[tuple[TensorMeta, ...], ...]

    def forms(self, stage: int) -> MessageMeta:
        """Of what a stage gets from those beside it, and sends them."""
        ends = ((), *self.passing, ())
        return {"before": ends[stage], "after": ends[stage + 1]}


def plan_stages(config: Config, mesh: Mesh, make: MakeModel) -> Stages:
    """Cut the model into the layout's stages. `make`: builds a chunk for the rank of a mesh."""
    num_stages = config.layout.pipeline.size
    layers = ranges_of(_partition(config))
    chunks = tuple(Chunk(run, stage == 0, stage == num_stages - 1) for stage, run in enumerate(layers))
    specs: dict[str, ShardSpec] = {}
    passing: list[tuple[TensorMeta, ...]] = []
    hidden: Hidden = ()
    for stage, chunk in enumerate(chunks):
        model, kit = make(_planned(mesh, stage), chunk)
        specs |= {name: replace(spec, tied=name in specs) for name, spec in shard_specs(model).items()}
        if not chunk.last:
            with torch.no_grad():
                hidden = model.hidden_states(empty_batch(config, kit, model.inside, torch.device("meta")), hidden)
            passing.append(tuple(TensorMeta(tuple(x.shape), x.dtype) for x in hidden))
    return Stages(chunks, specs, tuple(passing))


def empty_batch(config: Config, kit: Kit, inside: Sequence[str], device: torch.device) -> Batch:
    """This rank's rows of a microbatch of zeros."""
    shapes = chain_of(config).sample_shapes(config)
    zeros = {name: torch.zeros(config.micro, *shape, dtype=torch.long, device=device) for name, shape in shapes.items()}
    return rows_of_rank(zeros, kit, inside)


def _planned(mesh: Mesh, stage: int) -> Mesh:
    """The mesh of this rank's fellow on a stage, without numbers."""
    rank = mesh.grid.rank(mesh.grid.coordinates(mesh.rank) | {PIPE: stage})
    return planned_mesh(mesh.grid, rank, mesh.token_axes)


def _partition(config: Config) -> tuple[int, ...]:
    pipeline = config.layout.pipeline
    if pipeline.size == 1:
        return (config.model.num_blocks,)
    assert not isinstance(pipeline.partition, str), "resolve() decides the partition before a rank builds its stage"
    return pipeline.partition
