"""All stages of a run, built on the meta device: each rank knows all parameters, ties and messages without sending."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from meshwright.compute.model import Chunk, Hidden, at_once
from meshwright.compute.models.chain import Chain
from meshwright.compute.parameters.shard import ShardSpec, shard_specs
from meshwright.compute.tensor.kit import Kit
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import TensorMeta
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.section import Group
from meshwright.strategies.pipeline.stages import Stages, chunks_of, placement_of
from meshwright.training.rank_model import build_kit, build_model, empty_batch

if TYPE_CHECKING:
    from meshwright.config import Config


def plan_stages(config: Config, mesh: Mesh) -> Stages:
    """Build every stage's chunks on the meta device, each as held by the rank with this rank's other coordinates."""
    settings = config.layout.pipeline
    assert not isinstance(settings.partition, str) or settings.size == 1, "resolve() decides the partition beforehand"
    partition = settings.partition if not isinstance(settings.partition, str) else (config.model.num_blocks,)
    stages = Stages(chunks_of(partition, (PIPE,) if settings.head == "spread" else ()), {}, (), placement_of(config))
    specs: dict[str, ShardSpec] = {}
    models: list[tuple[Kit, Chain]] = []
    for stage in range(settings.size):
        # The rank of that stage with this rank's other coordinates, which exchanges messages with this rank.
        fellow = mesh.grid.rank(mesh.grid.coordinates(mesh.rank) | {PIPE: stage})
        there = planned_mesh(mesh.grid, fellow, mesh.token_axes)
        kit = build_kit(config, there)
        model = build_model(config, kit, there, Chunk.union(stages.of(stage)))
        model.run_groups([Group(chunk.layers, wrapped=False) for chunk in stages.of(stage)], at_once)
        # On the meta device a result's shape is enough. If heads attend by runs, step-by-step attention in Python took
        # five sixths of the plan of stages.
        for core in model.attention_cores():
            core.run_by(core.shaped)
        # A name of an earlier stage again: a tied table, or the head's table cut over stages.
        chain_specs = shard_specs(model).items()
        specs |= {name: replace(spec, tied=name in specs and PIPE not in spec.axes) for name, spec in chain_specs}
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
