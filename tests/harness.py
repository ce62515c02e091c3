"""Parts of a run for tests, built as on a machine with plenty of memory; the passes of a microbatch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from meshwright.compute.model import SAMPLES, Batch, Costs, Scales, to_device
from meshwright.config import Config
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.pipeline.partition import fastest
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.training.decisions import resolve_layout
from meshwright.training.parts import Parts
from meshwright.training.parts import build as build_resolved
from meshwright.training.rank_model import empty_batch
from meshwright.training.stage_costs import BuiltStages, time_links

PLENTY = Machine(cores=1, memory=2**50, shared=False, slow_halves=False)


class Weightless(BuiltStages):
    """Stages without memory: nothing is built to count bytes. `partition: measured` is timed in this process."""

    def partition(self, config: Config) -> tuple[int, ...]:
        if config.layout.pipeline.partition != "measured":
            return super().partition(config)
        embedding, *layers, head = time_links(config, torch.device("cpu"))
        costs, count = Costs(embedding, tuple(layers), head), config.num_microbatches
        return fastest(costs, placement_of(config), rule_of(config), count)

    def fixed_bytes(self, config: Config) -> list[int]:
        return [0] * config.layout.pipeline.size

    def block_bytes(self, config: Config) -> list[list[int]]:
        return [[]] * config.layout.pipeline.size

    def microbatch_bytes(self, config: Config) -> list[int]:
        return [0] * config.layout.pipeline.size


def resolved(config: Config) -> Config:
    """Resolve a config as a machine with plenty of memory does: all microbatches in flight, weights gathered."""
    return resolve_layout(config, PLENTY, Weightless()).config


def build(config: Config, mesh: Mesh, folder: Path = Path(), *, drawn: bool = True) -> Parts:
    """Call `parts.build` with a config that may say auto; `measured` is resolved before ranks start."""
    return build_resolved(resolved(config), mesh, folder, drawn=drawn)


def counted_step(config: Config, rank: int = 0) -> Parts:
    """Build a rank on the meta device; the ledger has a step's bytes without the norm and the step report."""
    mesh = planned_mesh(config.grid, rank, config.layout.token_axes)
    parts = build(config, mesh)
    mesh.ledger.traffic.clear()
    batches = [empty_batch(config, parts.kit, parts.model, mesh.device) for _ in range(config.num_microbatches)]
    parts.pipeline.train(batches, dict.fromkeys((*parts.model.labels, SAMPLES), 1.0), lambda index, chunk: None)
    parts.strategy.finish()
    parts.strategy.publish()
    return parts


def forward_and_backward(parts: Parts, batch: Batch, scales: Scales, *, final: bool = True) -> Tensor:
    """Run a microbatch of one stage; return the scaled loss. `final`: the step's last, with summed gradients."""
    (stage,) = parts.pipeline.stages
    parts.strategy.expect(final)
    (loss,) = stage.forward(0, (), to_device(batch, parts.mesh.device), scales)
    stage.backward(0, (), defers=False)
    return loss
