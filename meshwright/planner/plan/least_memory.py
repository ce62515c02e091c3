"""Lower bounds of a rank's memory without buckets, and without recordings of cut layers, for the search.

| bytes                      | bound                                                                          |
|----------------------------|--------------------------------------------------------------------------------|
| weights, gradients, states | of each parameter of the fullest stage: no padding, no bucket while it is sent |
| activations                | the same stages' with whole layers, in equal shares for the ranks of a layer   |

An estimate with buckets takes a millisecond and a recording of a cut layer ten. These bounds take microseconds, since
equal layers and equal cuts share their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from meshwright.compute.parameters.bucket import SlotSize, gradient_dtype
from meshwright.compute.parameters.role import Role
from meshwright.compute.tensor.section import Whole
from meshwright.config import Config
from meshwright.config.layout import ContextParallel
from meshwright.config.registry import load_entry
from meshwright.config.section import with_field
from meshwright.planner.plan.buckets import Buckets
from meshwright.planner.plan.memory import HeldStage, Parameter
from meshwright.planner.plan.remembered import PARTS, remembered, replaced
from meshwright.planner.plan.space import ranks_of_layer
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.data_parallel.strategy import Policy
from meshwright.strategies.memory.offload import master_bytes, moment_bytes
from meshwright.strategies.pipeline.stages import placement_of

if TYPE_CHECKING:
    from meshwright.planner.plan.timed_parts import HeldActivations, StageShape, TimedParts
    from meshwright.strategies.pipeline.placement import ChunkPlacement


class LeastBytes(NamedTuple):
    """Lower bounds of bytes: of weights and gradients, and of masters and moments."""

    weights: float = 0.0
    states: float = 0.0


class _Part(NamedTuple):
    """The least bytes of a part, and of each parameter by name."""

    total: LeastBytes
    parameters: dict[str, LeastBytes]


@dataclass
class LeastMemory:
    """Lower bounds for any layouts. `buckets`: the formats of a program's weights and slices."""

    buckets: Buckets
    parts: TimedParts
    activations: HeldActivations

    @remembered(
        *PARTS, "layout.data", "layout.pipeline.size", "layout.pipeline.chunks", "layout.pipeline.placement",
        "optimizer", "widens_gradients",
    )  # fmt: skip
    def of_weights(self, config: Config, partition: tuple[int, ...]) -> LeastBytes:
        """Return the bytes of the stage with most elements (Estimates.alone_memory), in any order of axes."""
        parts, placement = self._parts(config), placement_of(config)
        weights, states, last = 0.0, 0.0, max(parts)
        fullest = self.fullest(config, partition, placement)
        for position, times in fullest:
            weights += times * parts[position].total.weights
            states += times * parts[position].total.states
            # A table of both ends is held once. Two stages with such a table may share its gradients and states.
            share = 0.5 if placement.last_stage else float(position == last and (-1, 1) in fullest)
            if position in (-1, last) and share:
                tied = parts[-1].parameters.keys() & parts[last].parameters.keys()
                weights -= share * sum(parts[position].parameters[name].weights for name in tied)
                states -= share * sum(parts[position].parameters[name].states for name in tied)
        return LeastBytes(weights, states)

    @remembered(*PARTS)
    def fullest(self, config: Config, partition: tuple[int, ...], placement: ChunkPlacement) -> StageShape:
        """Return the stage with most elements, in which a table of both ends is counted twice."""
        shapes = self.parts.shapes(config, partition)
        stages = [tuple(run for at in positions for run in shapes[at]) for positions in placement.positions]
        sizes = self.parts.elements(config)
        elements = [sum(times * sizes[position] for position, times in stage) for stage in stages]
        return stages[elements.index(max(elements))]

    @remembered(*PARTS, "layout.data", "layout.pipeline.size", "optimizer", "widens_gradients")
    def _parts(self, config: Config) -> dict[int, _Part]:
        config = replaced(config, "layout.order", "auto", "widens_gradients")  # all orders have equal numbers of ranks
        mesh, sync = planned_mesh(config.grid, 0, config.layout.token_axes), config.layout.data.strategy
        policy: Policy = load_entry(sync.policy)()
        settings, widens = config.optimizer, config.widens_gradients

        @cache
        def of_element(role: Role, axes: tuple[str, ...], dtype: torch.dtype) -> LeastBytes:
            rule, owned = settings.update.rule_of(role), 1.0
            if policy.owners == "each":
                # Whole matrices are dealt in unequal shares.
                ranks = mesh.comm(*(axis for axis in axes if axis not in policy.apart)).size
                owned *= 0.0 if rule.by == "matrices" else 1 / ranks
            size = dtype.itemsize + min(0.0, self.buckets.low_weight)
            # A float32 slice of the weights is the optimizer's master.
            weights = (0.0 if self.buckets.casts else owned * size) if sync.gathers else size
            if not rule.trained:
                return LeastBytes(weights)
            gradient = gradient_dtype(dtype, widens).itemsize
            moments = sum(moment_bytes(settings, SlotSize(1, dtype, rule)))
            return LeastBytes(
                weights + (owned if sync.slices else 1.0) * gradient, owned * (master_bytes(settings, dtype) + moments)
            )

        def least(each: Parameter) -> LeastBytes:
            per_element = of_element(each.spec.role, tuple(each.spec.sum_axes(mesh)), each.dtype)
            return LeastBytes(each.num_elements * per_element.weights, each.num_elements * per_element.states)

        made = {}
        for position, parameters in self.parts.parameters(config).items():
            each = {parameter.name: least(parameter) for parameter in parameters}
            total = LeastBytes(*map(sum, zip(*each.values(), strict=True))) if each else LeastBytes()
            made[position] = _Part(total, each)
        return made

    def of_activations(self, config: Config, partition: tuple[int, ...]) -> tuple[HeldStage, ...]:
        """Return lower bounds of HeldActivations.of from recordings of whole layers: an equal share for each rank of a
        layer."""
        whole = with_field(with_field(config, "layout.context", ContextParallel()), "layout.tensor", Whole())
        ranks = ranks_of_layer(config.layout)
        return tuple(
            HeldStage(stage.kept_bytes / ranks, stage.peak_bytes / ranks, stage.share)
            for stage in self.activations.of(whole, partition)
        )
