"""A run's model, traced: a microbatch of it forward, on the serial kit without numbers.

The kit notes which layers are pairs, so that what is found in the graph by itself can be told from what a sub-graph
layout cuts. Its head is two operators, where the serial one works in hundreds of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import Config
from meshwright.model import IGNORED
from meshwright.models.chain import make_chain
from meshwright.parameters.shard import Initial
from meshwright.parts import empty_batch
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.tensor.head import HeadShape
from meshwright.tensor.serial import SerialHead, SerialKit
from meshwright.tools.branches.graph import Graph
from meshwright.tools.branches.region import Region
from meshwright.tools.branches.trace import trace

Branch = Literal["attention-core", "attention", "block"]
"""A value of layout.tensor.branch."""


class TracedHead(SerialHead):
    """Whole logits, and torch's cross entropy."""

    def __init__(self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None) -> None:
        super().__init__(mesh, shape, tied, (), ())
        self.smoothing = shape.smoothing

    def forward(self, h: Tensor, labels: Tensor, scale: float) -> Tensor:
        logits = self.logits(h[:, : labels.shape[1]]).flatten(0, 1)  # [B·t, V]
        smoothing = self.smoothing
        losses = F.cross_entropy(logits, labels.flatten(), None, None, IGNORED, None, "sum", smoothing)
        return losses * scale


class TracedKit(SerialKit):
    """`pairs`: the linears made as pairs, and where: those of `branches` apart."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.pairs: dict[nn.Module, Literal["branches", "slices"]] = {}

    @property
    def branches(self) -> TracedBranches:
        return TracedBranches(self)

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        layer = super().expand(hidden, inner, initial, groups=groups, bias=bias)
        self.pairs[layer] = "slices"
        return layer

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        layer = super().contract(inner, hidden, initial, bias=bias)
        self.pairs[layer] = "slices"
        return layer

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return TracedHead(self.mesh, shape, tied)


class TracedBranches:
    """The kit's `branches`."""

    def __init__(self, kit: TracedKit) -> None:
        self.kit = kit

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        return self._noted(self.kit.expand(hidden, inner, initial, groups=groups, bias=bias))

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return self._noted(self.kit.contract(inner, hidden, initial, bias=bias))

    def _noted(self, layer: nn.Module) -> nn.Module:
        self.kit.pairs[layer] = "branches"
        return layer


@dataclass(frozen=True)
class TracedModel:
    """Of a microbatch of `rows` samples. `pairs`: the paths of the linears of pairs, and where the model asked for
    them."""

    rows: int
    graph: Graph
    pairs: dict[str, Literal["branches", "slices"]]

    def cut_by(self, region: Region) -> tuple[Branch, ...]:
        """The values of layout.tensor.branch under which a sub-graph layout deals out this region's branches."""
        asked = {self.pairs.get(path) for path in region.linears}
        if asked == {"branches"}:
            return ("attention", "block") if region.cuts_linears else ("attention-core",)
        return ("block",) if asked == {"slices"} else ()


def trace_model(config: Config) -> TracedModel:
    """The run's model and a microbatch of it, whatever the layout."""
    kit = TracedKit(solo_mesh(torch.device("meta")))
    model = make_chain(config, kit)
    batch = empty_batch(config, kit, model.inside, kit.mesh.device)
    graph = trace(model, batch, dict.fromkeys(model.labels, 1.0))
    paths = {module: path for path, module in model.named_modules()}
    return TracedModel(config.micro, graph, {paths[layer]: where for layer, where in kit.pairs.items()})
