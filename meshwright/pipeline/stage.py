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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.model import Batch, Hidden, Model, Scales
from meshwright.parameters.gradients import Gradients, WeightWork

RunForward = Callable[[Model, Batch, Scales, Hidden], Hidden]
"""run(model, batch, scales, incoming): what the stage after reads, or (loss,)."""


Computing = Callable[[], AbstractContextManager[object]]
"""The context in which a stage's passes run."""


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


class Grains(Protocol):
    """The grains of microbatches, where a run has any (bits/grains.py)."""

    def of(self, batch: Batch, incoming: Hidden) -> Iterator[tuple[Batch, Hidden]]:
        """Each grain's rows of a microbatch, in order."""

    def begin(self, microbatch: int, number: int) -> None:
        """Say which grain of which microbatch goes forward."""

    def total_loss(self, losses: Sequence[Hidden]) -> Hidden:
        """(The sum of the grains' losses,), each a scalar."""


class Stage:
    """A chunk of the model on a rank; what it holds of each microbatch goes from task to task."""

    def __init__(
        self,
        model: Model,
        gradients: Gradients,
        *,
        run: RunForward = run_model,
        autocasts: tuple[str, torch.dtype] | None = None,
        multiplies: Computing = nullcontext,
        number: int = 0,
        grains: Grains | None = None,
    ) -> None:
        """`number`: the chunk's among those of its rank. `autocasts`: the type of device and the dtype of
        torch's autocast, under which forward passes run (O1); backward passes follow the dtypes that it chose.
        `multiplies`: the context in which all passes do, which says how a CPU multiplies halves.
        `grains`: the samples of a microbatch that are computed at a time; by default all of them."""
        self.model = model
        self.gradients = gradients
        self.run_forward = run
        self.autocasts, self.multiplies = autocasts, multiplies
        self.number = number
        self.grains = grains
        self._graphs: dict[int, list[Graph]] = {}
        self._works: dict[int, list[list[WeightWork]]] = {}

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
        if self.grains is None:
            graph, outgoing = self._forward(incoming, batch, scales)
            self._graphs[index] = [graph]
            return outgoing
        self._graphs[index], outgoings = [], []
        for number, (grain, rows) in enumerate(self.grains.of(batch, incoming)):
            self.grains.begin(index, number)
            graph, outgoing = self._forward(rows, grain, scales)
            self._graphs[index].append(graph)
            outgoings.append(outgoing)
        return self.grains.total_loss(outgoings) if self.is_last else joined(outgoings)

    def _forward(self, incoming: Hidden, batch: Batch, scales: Scales) -> tuple[Graph, Hidden]:
        for x in incoming:
            # A received tensor is a leaf, so its gradient ends in x.grad, from where it is sent.
            x.requires_grad_()
        with self.multiplies(), self.autocast():
            outgoing = self.run_forward(self.model, batch, scales, incoming)
        # The edges keep the graph, not the output's numbers: these were sent, and are the next stage's to hold.
        return Graph(incoming, tuple(get_gradient_edge(x) for x in outgoing)), tuple(x.detach() for x in outgoing)

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Hidden:
        """B: what the stage before reads. `gradients`: of what F gave, from the stage after. `defers`: W follows."""
        # Popped: the graph's activations go as soon as nothing but W's work needs them.
        graphs = self._graphs.pop(index)
        # A table that two chunks use has memory for each; the layers are not told which chunk runs.
        self.gradients.user = self.number
        afters = [None] * len(graphs) if self.is_last else split(gradients, len(graphs))  # a loss's own gradient is 1
        works: list[list[WeightWork]] = []
        for number, (graph, after) in enumerate(zip(graphs, afters, strict=True)):
            self.gradients.last_grain = number == len(graphs) - 1
            with self.multiplies():
                if defers:
                    with self.gradients.deferred() as of_grain:
                        torch.autograd.backward(graph.outgoing, after)
                    works.append(of_grain)
                else:
                    torch.autograd.backward(graph.outgoing, after)
        if defers:
            self._works[index] = works
        arrived = []
        for graph in graphs:
            assert all(x.grad is not None for x in graph.incoming), "a stage whose output does not depend on its input"
            arrived.append(tuple(x.grad for x in graph.incoming if x.grad is not None))
            for x in graph.incoming:
                x.grad = None  # x may have to live until W, while its gradient is freed when it is sent
        return joined(arrived)

    @torch.no_grad()
    def weights(self, index: int, *, final: bool) -> None:
        """W. `final`: its gradients are summed over ranks before those of another microbatch are added."""
        self.gradients.user = self.number
        grains = self._works.pop(index)
        for number, works in enumerate(grains):
            self.gradients.last_grain = number == len(grains) - 1
            with self.multiplies():
                for work in works:
                    work(final)

    @torch.no_grad()
    def preview(self, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """F without gradients, of a whole microbatch."""
        with self.multiplies(), self.autocast():
            return self.run_forward(self.model, batch, scales, incoming)

    @torch.no_grad()
    def evaluate(self, incoming: Hidden, batch: Batch) -> Hidden:
        """Forward without gradients: what the stage after reads, or (normed hidden states,)."""
        with self.multiplies(), self.autocast():
            if self.grains is None:
                return self.model.hidden_states(batch, incoming)
            return joined([self.model.hidden_states(grain, rows) for grain, rows in self.grains.of(batch, incoming)])


def split(hidden: Hidden, parts: int) -> list[Hidden]:
    """The rows of each tensor in so many equal parts, each in memory of its own."""
    if parts == 1:
        return [hidden]
    rows = [x.unflatten(0, (parts, len(x) // parts)) for x in hidden]  # none, where another rank holds all
    return [tuple(x[part].clone() for x in rows) for part in range(parts)]


def joined(parts: Sequence[Hidden]) -> Hidden:
    """The rows of each tensor, of all parts."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(rows) for rows in zip(*parts, strict=True))
