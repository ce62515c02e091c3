"""A stage acts: its stretch of the chain forward, the gradient of its input, the gradients of its weights.

| task | reads | leaves |
|---|---|---|
| F | the activation from before (first stage: the batch) | the activation for after (last stage: the loss), the graph |
| B | the gradient from after (last stage: the loss) | the gradient for before; where W is a task, its work |
| W | that work | the weights' gradients |
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.model import Batch, Hidden, Model, Scales, Stretch
from meshwright.parameters.deferred import Deferred, WeightWork


@dataclass(frozen=True)
class Graph:
    """A microbatch between F and B: its input, and where its backward pass begins.

    Only the edges of the output are kept: its numbers are needed by the stage after, which has a copy. `gradients`: of
    the loss by itself, where the backward pass begins with that.
    """

    incoming: Hidden
    outgoing: tuple[GradientEdge, ...]
    gradients: Hidden


@dataclass
class Stage:
    """One rank's; what it holds of each microbatch goes from task to task."""

    model: Model
    stretch: Stretch
    deferred: Deferred
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _works: dict[int, list[WeightWork]] = field(default_factory=dict)

    def forward(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """F: what the stage after reads, or (loss,)."""
        for x in incoming:
            x.requires_grad_()
        hidden = self.model.run_layers(self.model.begin(batch) if self.stretch.first else incoming, batch)
        outgoing = (self.model.loss(self.model.end(hidden), batch, scales),) if self.stretch.last else hidden
        ones = tuple(torch.ones_like(x) for x in outgoing) if self.stretch.last else ()
        self._graphs[index] = Graph(incoming, tuple(get_gradient_edge(x) for x in outgoing), ones)
        return tuple(x.detach() for x in outgoing)

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Hidden:
        """B: what the stage before reads. `gradients`: of what F gave, from the stage after. `defers`: W follows."""
        graph = self._graphs.pop(index)
        begin, after = graph.outgoing, graph.gradients or gradients
        if defers:
            with self.deferred.collecting() as works:
                torch.autograd.backward(begin, after)
            self._works[index] = works
        else:
            torch.autograd.backward(begin, after)
        return tuple(_gradient(x) for x in graph.incoming)

    @torch.no_grad()
    def weights(self, index: int, *, final: bool) -> None:
        """W. `final`: of the step's last microbatch."""
        for work in self._works.pop(index):
            work(final)

    def hidden(self, incoming: Hidden, batch: Batch) -> Hidden:
        """Forward without gradients: what the stage after reads, or (normed hidden states,)."""
        hidden = self.model.run_layers(self.model.begin(batch) if self.stretch.first else incoming, batch)
        return (self.model.end(hidden),) if self.stretch.last else hidden


def _gradient(x: Tensor) -> Tensor:
    """Taken from x, which may have to live until W, while its gradient is freed when it is sent."""
    gradient, x.grad = x.grad, None
    assert gradient is not None, "a stage whose output does not depend on its input"
    return gradient
