"""Findings of `meshwright branches`: a run's regions in groups of equal ones, and the speed-up bound of each group.

The forward pass of one microbatch is traced on the serial kit and meta tensors. The kit records the pairs of linears
that the model asks for: the graph's branches are compared with the branches that a sub-graph layout cuts.

The bound is the speed-up of g ranks over one if communication took no time (Amdahl, 1967; SUPER, IPDPS 2021, section
III). C: flops outside the assigned branches; D_r: flops of region r on its most loaded sub-grid, with branches dealt
out by cost (subgraph/branches.py). Regions run one after another; each ends with its slowest sub-grid.

| layout                                                        | bound                         |
|---------------------------------------------------------------|-------------------------------|
| D&SP: the g ranks share the rows of common layers             | total / (C/g + sum of D_r)    |
| D&SP-cSub, pure sub-graph parallelism: one rank computes them | total / (C + sum of D_r)      |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import IGNORED, SAMPLES
from meshwright.compute.models.chain import make_chain
from meshwright.compute.subgraph.branches import assign
from meshwright.compute.tensor.cross_entropy import Objective
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.serial import SerialHead, SerialKit
from meshwright.config import Config
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.tools.branches.graph import OperatorGraph
from meshwright.tools.branches.regions import Region, find_operator_parts, find_split_joins
from meshwright.tools.branches.trace import trace
from meshwright.training.rank_model import empty_batch

_NUMBER = re.compile(r"\d+")

Branch = Literal["attention-core", "attention", "block"]
"""A value of layout.tensor.branch."""

Where = Literal["branches", "slices"]
"""The one of the kit's two pairs that a linear belongs to."""


class TracedHead(SerialHead):
    """Head that computes whole logits and torch's cross entropy."""

    def __init__(self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None) -> None:
        # The real head loops over chunks and computes its own gradient: neither is in a forward graph of operators.
        super().__init__(mesh, shape, tied, {}, {})
        self.smoothing = shape.smoothing

    def forward(self, h: Tensor, labels: Tensor, scale: float | Objective) -> Tensor:
        logits = self.logits(h[:, : labels.shape[1]]).flatten(0, 1)  # [B·t, V]
        smoothing = self.smoothing
        if callable(scale):
            losses = F.cross_entropy(logits, labels.flatten(), None, None, IGNORED, None, "none", smoothing)
            return scale(losses.view(labels.shape).sum(1))
        losses = F.cross_entropy(logits, labels.flatten(), None, None, IGNORED, None, "sum", smoothing)
        return losses * scale


class TracedKit(SerialKit):
    """Serial kit that records each linear of a pair in `pairs`, with the pair that asked: `branches` or `slices`."""

    def __init__(self, mesh: Mesh, where: Where = "slices", pairs: dict[nn.Module, Where] | None = None) -> None:
        super().__init__(mesh)
        self.where: Where = where
        self.pairs = {} if pairs is None else pairs

    @property
    def branches(self) -> TracedKit:
        return TracedKit(self.mesh, "branches", self.pairs)

    def expand(self, *sizes: Any, **options: Any) -> nn.Module:
        layer = super().expand(*sizes, **options)
        self.pairs[layer] = self.where
        return layer

    def contract(self, *sizes: Any, **options: Any) -> nn.Module:
        layer = super().contract(*sizes, **options)
        self.pairs[layer] = self.where
        return layer

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return TracedHead(self.mesh, shape, tied)


@dataclass(frozen=True)
class TracedModel:
    """A traced microbatch of `rows` samples. `pairs`: for the path of each linear of a pair, the pair that the model
    asked for."""

    rows: int
    graph: OperatorGraph
    pairs: dict[str, Where]

    def cut_by(self, region: Region) -> tuple[Branch, ...]:
        """Return the values of layout.tensor.branch under which a sub-graph layout assigns this region's branches."""
        # All linears must be of the same pair: no layout cuts a region between two pairs.
        asked = {self.pairs.get(path) for path in region.linears}
        if asked == {"branches"}:
            return ("attention", "block") if region.cuts_linears else ("attention-core",)
        return ("block",) if asked == {"slices"} else ()


def trace_model(config: Config) -> TracedModel:
    """Trace the run's model on an empty microbatch; the run's layout has no effect."""
    kit = TracedKit(solo_mesh(torch.device("meta")))
    model = make_chain(config, kit)
    batch = empty_batch(config, kit, model, kit.mesh.device)
    graph = trace(model, batch, dict.fromkeys((*model.labels, SAMPLES), 1.0))
    paths = {module: path for path, module in model.named_modules()}
    return TracedModel(config.micro, graph, {paths[layer]: where for layer, where in kit.pairs.items()})


Dealt = tuple[Sequence[float], int]
"""The costs of a region's branches, and the number of such regions."""


@dataclass(frozen=True)
class Bound:
    """Speed-ups against one rank. `all_ranks`: common layers on all (D&SP); `one_subgrid`: on one (cSub)."""

    all_ranks: float
    one_subgrid: float


def bound(total: float, regions: Sequence[Dealt], num_subgrids: int) -> Bound:
    """Return the bound for a model of `total` flops with disjoint `regions`, on sub-grids of one rank each."""
    common = total - sum(times * sum(costs) for costs, times in regions)
    slowest = sum(times * most_loaded(costs, num_subgrids) for costs, times in regions)
    return Bound(total / (common / num_subgrids + slowest), total / (common + slowest))


def most_loaded(costs: Sequence[float], num_subgrids: int) -> float:
    """Return the cost of the most loaded sub-grid. With fewer branches than sub-grids some sub-grids are idle."""
    # `assign` is the kit's own rule, so the bound holds for layouts that can be run.
    shares = assign(costs, min(num_subgrids, len(costs)))
    return max(sum(costs[branch] for branch in share) for share in shares)


@dataclass(frozen=True)
class RegionGroup:
    """Regions whose paths differ only in layer numbers."""

    region: Region
    """The first region of the group."""
    places: tuple[str, ...]
    """The path of each region."""
    cut_by: tuple[Branch, ...]
    """The values of layout.tensor.branch that assign these regions."""
    bounds: dict[int, Bound]
    """By number of sub-grids: the bound if these regions alone are assigned."""

    @property
    def total_flops(self) -> float:
        return len(self.places) * self.region.total_flops


@dataclass(frozen=True)
class Findings:
    """Branches and bounds of the forward pass of one microbatch."""

    rows: int
    """Samples in the microbatch."""
    total_flops: int
    longest_flops: int
    """Flops of the most expensive chain of operators."""
    lone: int
    """The number of residual joins: a value joined with the output of the only branch that reads the value."""
    groups: tuple[RegionGroup, ...]
    layouts: dict[Branch, dict[int, Bound]]
    """Bounds by value of layout.tensor.branch and number of sub-grids; without values that would cut nothing."""


def findings_of(model: TracedModel, grids: Sequence[int]) -> Findings:
    """Find the branches of a traced model. `grids`: the numbers of sub-grids to compute bounds for."""
    joins = find_split_joins(model.graph)
    groups = _grouped(model, (*joins.regions, *find_operator_parts(model.graph)), grids)
    total = model.graph.total_flops
    layouts = {}
    for value in get_args(Branch):
        assigned = [(group.region.flops, len(group.places)) for group in groups if value in group.cut_by]
        if assigned:
            layouts[value] = {size: bound(total, assigned, size) for size in grids}
    return Findings(model.rows, total, model.graph.longest_flops, joins.lone, groups, layouts)


def unnumbered(path: str) -> str:
    """Replace layer numbers: `blocks.3.attention` -> `blocks.*.attention`."""
    return _NUMBER.sub("*", path)


def _grouped(model: TracedModel, regions: Sequence[Region], grids: Sequence[int]) -> tuple[RegionGroup, ...]:
    alike: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        names = tuple(map(unnumbered, region.names))
        # Equal flops too: a first layer that is wider than the others forms its own group.
        key = (region.form, unnumbered(region.where), region.enter, region.leave, region.flops, names)
        alike.setdefault((*key, model.cut_by(region)), []).append(region)
    total = model.graph.total_flops
    groups = []
    for same in alike.values():
        first, places = same[0], tuple(region.where for region in same)
        bounds = {size: bound(total, [(first.flops, len(places))], size) for size in grids}
        groups.append(RegionGroup(first, places, model.cut_by(first), bounds))
    return tuple(groups)
