"""A stage computes its chunk's tasks: forward (F), the gradient of its input (B), the gradients of its weights (W).

| task | reads | writes |
|---|---|---|
| F | the previous chunk's activation (first chunk: the batch) | the activation (last chunk: the loss), the graph |
| B | the next chunk's gradient (last chunk: the loss) | the input's gradient; with W tasks deferred weight gradients |
| W | the deferred weight gradients | the weights' gradients |

A rank has one `Stage` for each of its chunks. A model on one device is one stage, first and last at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.compute.model import Batch, Hidden, Model, Scales
from meshwright.compute.parameters.gradients import Gradients, WeightWork

RunForward = Callable[[Model, Batch, Scales, Hidden], Hidden]
"""run(model, batch, scales, incoming): the activation for the next stage, or (loss,). The model's own forward pass; a
data-parallel strategy may replace it."""


Computing = Callable[[], AbstractContextManager[object]]
"""Makes the context manager of a stage's passes."""


Edges = tuple[GradientEdge | None, ...]
"""The autograd edge of each output, to begin the backward pass from; None if no trained parameter affects the
output."""


def edges_of(outputs: Sequence[Tensor]) -> Edges:
    """Return the autograd edges of outputs. Edges keep the graph alive, but not the outputs' memory: the next stage
    holds a copy."""
    return tuple(get_gradient_edge(x) if x.requires_grad else None for x in outputs)


def backward_from(edges: Edges, gradients: Sequence[Tensor | None]) -> None:
    """Run the backward pass from outputs that have edges.

    Args:
        edges: of the outputs.
        gradients: of the outputs; None: of a loss, with gradient 1.
    """
    ends = [(edge, x) for edge, x in zip(edges, gradients, strict=True) if edge is not None]
    if ends:
        torch.autograd.backward([edge for edge, _ in ends], [x for _, x in ends])


@dataclass(frozen=True)
class Graph:
    """A microbatch between F and B: its input, and the autograd edges that begin the backward pass.

    The output is not kept: the next stage has a copy.
    """

    incoming: Hidden
    outgoing: Edges


class Portions(Protocol):
    """Equal portions of a microbatch's samples, computed one after another."""

    def of(self, batch: Batch, incoming: Hidden, microbatch: int | None = None) -> Iterator[tuple[Batch, Hidden]]:
        """Yield each portion's rows. `microbatch`: its number in the step, if a forward pass begins."""

    def begin_step(self, first: int, scale: float) -> None:
        """Begin a step. `first`: number of this replica's first sample in the run; `scale`: of the loss."""

    def total_loss(self, losses: Sequence[Hidden]) -> Hidden:
        """Return (the sum of the portions' losses,)."""


class Stage:
    """A chunk of the model on a rank, with the graphs of its microbatches in flight."""

    def __init__(
        self,
        model: Model,
        gradients: Gradients,
        *,
        run: RunForward | None = None,
        autocasts: tuple[str, torch.dtype] | None = None,
        chunk_index: int = 0,
        portions: Portions | None = None,
        learns: bool = True,
    ) -> None:
        """`run`: None: the model's own forward pass. `chunk_index`: the chunk's index on its rank. `autocasts`: (device
        type, dtype) of autocast in forward passes (O1) or None. `portions`: None: a microbatch is computed at once.
        `learns`: whether an earlier part of the chain is trained; if not, B returns zeros as input gradients, and
        nothing is computed for them."""
        self.model, self.is_last = model, model.chunk.last
        self.gradients = gradients
        self.run_forward: RunForward = run or operator.call
        self.autocasts = autocasts
        self.autocast: Computing = nullcontext if autocasts is None else partial(torch.autocast, *autocasts)
        """Makes the context of forward passes."""
        self.chunk_index = chunk_index
        self.portions, self.learns = portions, learns
        self._graphs: dict[int, list[Graph]] = {}
        self._works: dict[int, list[list[WeightWork]]] = {}

    def forward(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """Run F; return the activation for the next stage, or (loss,)."""
        if self.portions is None:
            graph, outgoing = self._forward(incoming, batch, scales)
            self._graphs[index] = [graph]
            return outgoing
        self._graphs[index], outgoings = [], []
        for portion, rows in self.portions.of(batch, incoming, index):
            graph, outgoing = self._forward(rows, portion, scales)
            self._graphs[index].append(graph)
            outgoings.append(outgoing)
        return self.portions.total_loss(outgoings) if self.is_last else joined(outgoings)

    def _forward(self, incoming: Hidden, batch: Batch, scales: Scales) -> tuple[Graph, Hidden]:
        for x in incoming:
            # A received tensor is a leaf; x.grad is sent back.
            x.requires_grad_(self.learns)
        with self.autocast():
            outgoing = self.run_forward(self.model, batch, scales, incoming)
        return Graph(incoming, edges_of(outgoing)), tuple(x.detach() for x in outgoing)

    @torch.no_grad()
    def preview(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """Run F without gradients; return the output of F."""
        outgoing = self.forward(index, incoming, batch, scales)
        del self._graphs[index]
        return outgoing

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Hidden:
        """Run B; return the gradients for the previous stage. `gradients`: of F's outputs; `defers`: a task W
        follows."""
        # Popped, so that only activations needed by deferred weight gradients stay in memory.
        graphs = self._graphs.pop(index)
        afters = [(None,)] * len(graphs) if self.is_last else split(gradients, len(graphs))
        works: list[list[WeightWork]] = []
        for portion_index, (graph, after) in enumerate(zip(graphs, afters, strict=True)):
            # A table shared by two chunks has gradient memory for each, selected here.
            self.gradients.begin_pass(self.chunk_index, last_portion=portion_index == len(graphs) - 1)
            if defers:
                with self.gradients.deferred() as of_portion:
                    backward_from(graph.outgoing, after)
                works.append(of_portion)
            else:
                backward_from(graph.outgoing, after)
        if defers:
            self._works[index] = works
        arrived = []
        for graph in graphs:
            if not self.learns:
                arrived.append(tuple(map(torch.zeros_like, graph.incoming)))
                continue
            assert all(x.grad is not None for x in graph.incoming), "a stage whose output does not depend on its input"
            arrived.append(tuple(x.grad for x in graph.incoming if x.grad is not None))
            for x in graph.incoming:
                x.grad = None  # x may be needed until W; the gradient is freed when sent
        return joined(arrived)

    @torch.no_grad()
    def weights(self, index: int, *, final: bool) -> None:
        """Run W. `final`: the gradients are summed over ranks before the next microbatch's are added."""
        portions = self._works.pop(index)
        for portion_index, works in enumerate(portions):
            self.gradients.begin_pass(self.chunk_index, last_portion=portion_index == len(portions) - 1)
            for work in works:
                work(final)

    @torch.no_grad()
    def evaluate(self, incoming: Hidden, batch: Batch) -> Hidden:
        """Run a forward pass without gradients: return the activation for the next stage, or (normed hidden
        states,)."""
        with self.autocast():
            if self.portions is None:
                return self.model.hidden_states(batch, incoming)
            portions = self.portions.of(batch, incoming)
            return joined([self.model.hidden_states(portion, rows) for portion, rows in portions])


def split(hidden: Hidden, parts: int) -> list[Hidden]:
    """Return the rows of each tensor in `parts` equal parts, copied."""
    if parts == 1:
        return [hidden]
    rows = [x.unflatten(0, (parts, len(x) // parts)) for x in hidden]  # no rows if another rank holds all
    return [tuple(x[index].clone() for x in rows) for index in range(parts)]


def joined(parts: Sequence[Hidden]) -> Hidden:
    """Return each tensor's rows of all parts, concatenated."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(rows) for rows in zip(*parts, strict=True))
