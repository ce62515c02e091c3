"""A chunk's tasks piece by piece: they end where rows leave for other ranks' experts, so that others run meanwhile.

| piece of a layer with experts | ends with rows that go      | backward it begins with the gradient of |
|-------------------------------|-----------------------------|------------------------------------------|
| attention, router             | to their experts (dispatch) | these rows, which comes back             |
| experts                       | back (combine)              | their outputs                            |
| sum, up to the next router    | to the next layer's experts | ...                                      |

A chunk of l layers with experts is 2 l + 1 pieces. autograd's graph is cut at the same places as at a stage's ends:
rows that came are leaves, whose gradients travel back. What stays on the rank from a piece to a later one (hidden
states, weights of the choice) is cut as well, or a backward pass would run on into a piece whose rows' gradients are
under way; those gradients wait in the leaves.

Each kind of task runs in the order of the microbatches in every piece, so each parameter's gradient is added up in
that order, whatever rows came first: the same bits in every run.
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
    """A piece of a microbatch between F and B. `incoming`: the leaves whose gradients B gives; `outgoing`: where its
    backward pass begins; `stays`: leaves that later pieces read, in which the rest of its gradients will lie."""

    incoming: Hidden
    outgoing: Edges
    stays: Hidden = ()


class PieceStage:
    """A chunk of the model on a rank, in pieces. `stage`: the chunk as a whole, which evaluations run; `first`: the
    number of its first piece among those of its rank."""

    def __init__(self, stage: Stage, first: int) -> None:
        self.stage, self.first = stage, first
        self._flows: dict[int, Pieces] = {}
        self._graphs: dict[int, list[PieceGraph]] = {}
        self._trades: dict[int, list[Crossing]] = {}
        """By microbatch, the trades that have ended its pieces so far: their rows go back the same way."""
        self._works: dict[tuple[int, int], list[WeightWork]] = {}

    def forward(self, index: int, place: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden | Crossing:
        """F of a piece: the rows that leave, or of the last what the chunk after reads, or (loss,)."""
        for x in incoming:
            x.requires_grad_()  # a leaf, whose gradient B sends back
        with self.stage.autocast():
            if place == 0:
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

    def backward(self, index: int, place: int, gradients: Hidden) -> Hidden | Crossing:
        """B of a piece, whose W follows: the gradient of the rows that came, which go back to where they came from, or
        of the first piece what the chunk before reads. `gradients`: of what F gave; none at the chain's end."""
        graphs = self._graphs[index]
        graph = graphs.pop()
        assert len(graphs) == place, f"B of piece {place} with {len(graphs)} pieces before it"
        self.stage.gradients.begin_pass(self.first + place)
        stayed = tuple(x.grad for x in graph.stays)
        assert all(x is not None for x in stayed), "what stays on a rank and no later piece depends on"
        with self.stage.gradients.deferred() as works:
            backward_from(graph.outgoing, (*gradients, *stayed) or (None,))
        self._works[index, place] = works
        arrived = tuple(x.grad for x in graph.incoming if x.grad is not None)
        assert len(arrived) == len(graph.incoming), "a piece whose output does not depend on its input"
        for x in graph.incoming:
            x.grad = None
        if place == 0:
            del self._graphs[index], self._trades[index]
            return arrived
        trade = self._trades[index].pop()
        return Crossing(arrived[0], trade.taken, trade.given)

    def weights(self, index: int, place: int, *, final: bool) -> None:
        """W of a piece. `final`: as of a stage's."""
        self.stage.gradients.begin_pass(self.first + place)
        with torch.no_grad():
            for work in self._works.pop((index, place)):
                work(final)


@dataclass(frozen=True)
class _Trade:
    """Rows under way. `sent` lives until they have left."""

    arrival: Arrival
    posted: Posted
    came: Tensor
    sent: Tensor


@dataclass
class Exchanges:
    """The trades of rows that a rank has begun, which travel while it does other tasks.

    `comm`: of the ranks that hold a layer's experts. They do their tasks in one order, and so begin their trades in
    one; how long each is under way is no matter.
    """

    comm: Comm
    under_way: list[_Trade] = field(default_factory=list, init=False)

    def begin(self, task: Task, crossing: Crossing) -> None:
        """Send the rows that end a piece. `task`: what those that come let this stage do."""
        rows = crossing.rows.contiguous()
        came = rows.new_empty(sum(crossing.taken), *rows.shape[1:])
        width = rows[:1].numel() if len(rows) else came[:1].numel()
        # Comms count elements, and know nothing of rows.
        sizes = (tuple(count * width for count in counts) for counts in (crossing.taken, crossing.given))
        posted = self.comm.post_all_to_all(came, rows, PieceSizes(*sizes))
        self.under_way.append(_Trade(task, posted, came, rows))

    @property
    def is_empty(self) -> bool:
        return not self.under_way

    def poll(self) -> list[tuple[Arrival, Tensor]]:
        """The rows that have come since the last call, with the tasks that they make ready. Waits for nothing."""
        over = [trade for trade in self.under_way if trade.posted.is_completed()]
        for trade in over:
            trade.posted.wait()  # on a GPU its stream may read them only behind this
            self.under_way.remove(trade)
        return [(trade.arrival, trade.came) for trade in over]


@dataclass(frozen=True)
class PiecewiseChunks:
    """A rank's chunks as training runs them: `placement` counts their pieces, `exchanges` carry rows between them.
    `states`: the hidden states that all stages read, where each has a part of the head."""

    stages: Sequence[PieceStage]
    placement: ChunkPlacement
    exchanges: Exchanges
    states: TensorMeta | None = None
