"""A stage acts: a chunk of the model forward, the gradient of its input, the gradients of its weights.

| task | reads | leaves |
|---|---|---|
| F | the activation from before (first chunk: the batch) | the activation for after (last chunk: the loss), the graph |
| B | the gradient from after (last chunk: the loss) | the gradient for before; where W is a task, its work |
| W | that work | the weights' gradients |

A rank that holds several chunks has a `Stage` for each. A model on one device is one, the first and the last: F reads
the batch and gives the loss, B begins with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.model import Batch, Hidden, Model, Scales
from meshwright.parameters.gradients import Gradients, WeightWork

RunForward = Callable[[Model, Batch, Scales, Hidden], Hidden]
"""run(model, batch, scales, incoming): what the stage after reads, or (loss,)."""


def run_model(model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
    """The model's own forward pass; a data-parallel strategy may bring another."""
    return model(batch, scales, incoming)


@dataclass(frozen=True)
class Graph:
    """A microbatch between F and B: its input, and where its backward pass begins.

    Only the edges of the output are kept: its numbers are needed by the stage after, which has a copy.
    """

    incoming: Hidden
    outgoing: tuple[GradientEdge, ...]


class Stage:
    """A chunk of the model on a rank; what it holds of each microbatch goes from task to task."""

    def __init__(
        self,
        model: Model,
        gradients: Gradients,
        *,
        run: RunForward = run_model,
        autocasts: tuple[str, torch.dtype] | None = None,
        number: int = 0,
    ) -> None:
        """`number`: the chunk's among those of its rank. `autocasts`: the type of device and the dtype of
        torch's autocast, under which forward passes run (O1); backward passes follow the dtypes that it chose."""
        self.model = model
        self.gradients = gradients
        self.run_forward = run
        self.autocasts = autocasts
        self.number = number
        self._graphs: dict[int, Graph] = {}
        self._works: dict[int, list[WeightWork]] = {}

    @property
    def is_first(self) -> bool:
        return self.model.chunk.first

    @property
    def is_last(self) -> bool:
        return self.model.chunk.last

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which the model is called."""
        return nullcontext() if self.autocasts is None else torch.autocast(*self.autocasts)

    def forward(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """F: what the stage after reads, or (loss,)."""
        for x in incoming:
            x.requires_grad_()
        with self.autocast():
            outgoing = self.run_forward(self.model, batch, scales, incoming)
        self._graphs[index] = Graph(incoming, tuple(get_gradient_edge(x) for x in outgoing))
        return tuple(x.detach() for x in outgoing)

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Hidden:
        """B: what the stage before reads. `gradients`: of what F gave, from the stage after. `defers`: W follows."""
        graph = self._graphs.pop(index)
        begin, after = graph.outgoing, None if self.is_last else gradients  # a loss's own gradient is 1
        self.gradients.user = self.number
        if defers:
            with self.gradients.deferred() as works:
                torch.autograd.backward(begin, after)
            self._works[index] = works
        else:
            torch.autograd.backward(begin, after)
        return tuple(_gradient(x) for x in graph.incoming)

    @torch.no_grad()
    def weights(self, index: int, *, final: bool) -> None:
        """W. `final`: its gradients are summed over ranks before those of another microbatch are added."""
        self.gradients.user = self.number
        for work in self._works.pop(index):
            work(final)

    @torch.no_grad()
    def evaluate(self, incoming: Hidden, batch: Batch) -> Hidden:
        """Forward without gradients: what the stage after reads, or (normed hidden states,)."""
        with self.autocast():
            return self.model.hidden_states(batch, incoming)


def _gradient(x: Tensor) -> Tensor:
    """Taken from x, which may have to live until W, while its gradient is freed when it is sent."""
    gradient, x.grad = x.grad, None
    assert gradient is not None, "a stage whose output does not depend on its input"
    return gradient
