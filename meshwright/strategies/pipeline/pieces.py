"""Chunks run piece by piece: a piece ends when rows are sent to other ranks' experts, and other pieces run meanwhile.

| piece of a layer with experts | ends with rows sent         | its backward pass begins with the gradient of |
|-------------------------------|-----------------------------|-----------------------------------------------|
| attention, router             | to their experts (dispatch) | these rows, received from the experts' ranks  |
| experts                       | back (combine)              | their outputs                                 |
| sum, up to the next router    | to the next layer's experts | ...                                           |

A chunk of l layers with experts has 2 l + 1 pieces. autograd's graph is cut between pieces as between stages: received
rows are leaves, and the gradients of these leaves are sent back. Tensors that stay on the rank for a later piece
(hidden states, routing weights) are cut, too. Otherwise a backward pass would continue into a piece before the
gradients of the piece's rows are received. The gradients of these tensors wait in the leaves.

Each kind of task runs in the order of the microbatches in every piece. Each parameter's gradient is therefore added in
that order, whatever rows arrive first: equal bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compute.model import Batch, Crossing, Hidden, Pieces, Scales
from meshwright.compute.parameters.gradients import WeightWork
from meshwright.ranks.comm import Comm, PieceSizes, Posted
from meshwright.ranks.mailbox import TensorMeta
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.stage import Edges, Stage, backward_from, edges_of
from meshwright.strategies.pipeline.task import Arrival, Task


@dataclass(frozen=True)
class PieceGraph:
    """A piece of a microbatch between F and B."""

    incoming: Hidden
    """Leaves; B returns the gradients of these tensors."""
    outgoing: Edges
    """The edges that begin the backward pass."""
    stays: Hidden = ()
    """Leaves that later pieces read; B reads the gradients of these leaves as gradients of the piece's outputs."""


class PieceStage:
    """A chunk of the model on a rank, in pieces. `stage`: the whole chunk, used for evaluations; `first`: number of the
    chunk's first piece among the rank's pieces."""

    def __init__(self, stage: Stage, first: int) -> None:
        self.stage, self.first = stage, first
        self._flows: dict[int, Pieces] = {}
        self._graphs: dict[int, list[PieceGraph]] = {}
        self._trades: dict[int, list[Crossing]] = {}
        """By microbatch, the exchanges at the ends of finished pieces; B sends gradients back the same way."""
        self._works: dict[tuple[int, int], list[WeightWork]] = {}

    def forward(
        self, index: int, piece_index: int, incoming: Hidden, batch: Batch, scales: Scales
    ) -> Hidden | Crossing:
        """Run F of a piece; return the rows to send or, for the last piece, the next chunk's input or (loss,)."""
        for x in incoming:
            x.requires_grad_()  # a leaf; B sends the gradient back
        with self.stage.autocast():
            if piece_index == 0:
                flow = self._flows[index] = self.stage.model.in_pieces(batch, scales, incoming)
                self._graphs[index], self._trades[index] = [], []
                given: Hidden | None = None
            else:
                flow, given = self._flows[index], (*incoming, *self._graphs[index][-1].stays)
            try:
                crossing = next(flow) if given is None else flow.send(given)
            except StopIteration as end:
                del self._flows[index]
                outgoing: Hidden = end.value
                self._graphs[index].append(PieceGraph(incoming, edges_of(outgoing)))
                return tuple(x.detach() for x in outgoing)
        stays = tuple(x.detach().requires_grad_() for x in crossing.stays)
        edges = edges_of((crossing.rows, *crossing.stays))
        self._graphs[index].append(PieceGraph(incoming, edges, stays))
        crossing = Crossing(crossing.rows.detach(), crossing.given, crossing.taken)
        self._trades[index].append(Crossing(crossing.rows[:0], crossing.given, crossing.taken))
        return crossing

    def backward(self, index: int, piece_index: int, gradients: Hidden) -> Hidden | Crossing:
        """Run B of a piece; W follows. Return the gradient of the received rows, to be sent back to their ranks, or of
        the first piece the gradients for the previous chunk. `gradients`: of F's results; none at the chain's end."""
        graphs = self._graphs[index]
        graph = graphs.pop()
        assert len(graphs) == piece_index, f"B of piece {piece_index} with {len(graphs)} pieces before it"
        self.stage.gradients.begin_pass(self.first + piece_index)
        stayed = tuple(x.grad for x in graph.stays)
        assert all(x is not None for x in stayed), "what stays on a rank and no later piece depends on"
        with self.stage.gradients.deferred() as works:
            backward_from(graph.outgoing, (*gradients, *stayed) or (None,))
        self._works[index, piece_index] = works
        arrived = tuple(x.grad for x in graph.incoming if x.grad is not None)
        assert len(arrived) == len(graph.incoming), "a piece whose output does not depend on its input"
        for x in graph.incoming:
            x.grad = None
        if piece_index == 0:
            del self._graphs[index], self._trades[index]
            return arrived
        trade = self._trades[index].pop()
        return Crossing(arrived[0], trade.taken, trade.given)

    def weights(self, index: int, piece_index: int, *, final: bool) -> None:
        """Run W of a piece. `final`: as for `Stage.weights`."""
        self.stage.gradients.begin_pass(self.first + piece_index)
        with torch.no_grad():
            for work in self._works.pop((index, piece_index)):
                work(final)


@dataclass(frozen=True)
class _Trade:
    """Rows in transit. `sent` is kept until the send has finished."""

    arrival: Arrival
    posted: Posted
    came: Tensor
    sent: Tensor


@dataclass
class Exchanges:
    """A rank's exchanges of rows in transit, while the rank runs other tasks.

    `comm`: the ranks that hold a layer's experts. All run tasks in one order, so exchanges begin in one order; the time
    in transit does not matter.
    """

    comm: Comm
    under_way: list[_Trade] = field(default_factory=list, init=False)

    def begin(self, task: Task, crossing: Crossing) -> None:
        """Send the rows at the end of a piece. `task`: the task made ready by the rows received in exchange."""
        rows = crossing.rows.contiguous()
        came = rows.new_empty(sum(crossing.taken), *rows.shape[1:])
        width = rows[:1].numel() if len(rows) else came[:1].numel()
        # Comms count elements, not rows.
        sizes = (tuple(count * width for count in counts) for counts in (crossing.taken, crossing.given))
        posted = self.comm.post_all_to_all(came, rows, PieceSizes(*sizes))
        self.under_way.append(_Trade(task, posted, came, rows))

    @property
    def is_empty(self) -> bool:
        return not self.under_way

    def poll(self) -> list[tuple[Arrival, Tensor]]:
        """Return the rows received since the last call, with the tasks that they make ready. Does not wait."""
        over = [trade for trade in self.under_way if trade.posted.is_completed()]
        for trade in over:
            trade.posted.wait()  # on a GPU: orders the stream's reads after the receive
            self.under_way.remove(trade)
        return [(trade.arrival, trade.came) for trade in over]


@dataclass(frozen=True)
class PiecewiseChunks:
    """A rank's chunks as training runs them, in pieces."""

    stages: Sequence[PieceStage]
    placement: ChunkPlacement
    """Counts pieces in place of chunks."""
    exchanges: Exchanges
    """The exchanges of rows between pieces."""
    states: TensorMeta | None = None
    """The hidden states that all stages read, if each stage has a part of the head."""
