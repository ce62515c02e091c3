"""Products of matrices that are cut into q x q blocks over (row, col): Y = X W, dX = dY Wᵀ, dW = Xᵀ dY.

Rank (i, j) holds block (i, j) of each: X [b/q, H/q], W [H/q, N/q], Y [b/q, N/q]. (With a depth, b are one depth slice's
rows, and every slice multiplies by itself: Tesseract, ICPP 2022.) In each of the three products one of the three stays
where it is, and the two others travel: an input to where it is needed, an output to where it belongs. A traveller
moves in q panels, indexed by the dim that the staying one has not:

| stays | panels over | X travels                | W travels                | Y travels            |
|-------|-------------|--------------------------|--------------------------|----------------------|
| Y     | H           | over col                 | over row                 | -                    |
| W     | b           | transposed, then col     | -                        | over row             |
| X     | N           | -                        | transposed, then row     | over col             |

(The papers' SUMMA loops: in Y = X W, Y stays; in dX, dY does; in dW, dY does: always the Y row of this table.) "Over
col" is an all-gather of an input and a reduce-scatter of an output; in the streaming form it is q broadcasts or
reductions of one panel, each started while the last one is multiplied. "Transposed": first (i, j) and (j, i) exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product, repeat

import torch
from torch import Tensor

from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.collectives import Moving, here
from meshwright.ranks.comm import Work
from meshwright.ranks.mesh import Mesh

X, W, Y = "X", "W", "Y"

Panels = Iterable[Tensor]
"""q tensors of one block's shape; they may arrive one by one, and be overwritten after the next one has come."""


@dataclass(frozen=True)
class Route:
    """How a traveller moves: over which axis, and whether (i, j) and (j, i) change places on the far side."""

    axis: str
    transposed: bool


ROUTES = {
    Y: {X: Route("col", False), W: Route("row", False)},
    W: {X: Route("col", True), Y: Route("row", False)},
    X: {W: Route("row", True), Y: Route("col", False)},
}
"""By what stays, then by who travels."""


@dataclass(frozen=True)
class Stationary:
    """The matrix (X, W or Y) that stays in place in the forward product, in dX's and in dW's; the other two travel."""

    forward: str
    dx: str
    dw: str


@dataclass(frozen=True)
class Form:
    """Whether operands stream in panels, and whether gathered weights are kept over a step."""

    streams: bool
    keeps: bool


@dataclass(frozen=True)
class Sizes:
    """A rank's rows of X and its columns of X and of Y; q."""

    rows: int
    inputs: int
    outputs: int
    q: int

    def sent(self, choice: Stationary, form: Form) -> int:
        """Elements that a rank (off the diagonal) sends for the three products.

        What one product gathered may serve the next: the weight in dX where it is kept, dY in dW unless it streams.
        """
        there: set[tuple[str, str]] = set()
        rows, inputs, outputs, total = self.rows, self.inputs, self.outputs, 0
        blocks = {X: rows * inputs, W: inputs * outputs, Y: rows * outputs}
        for target, stays in ((Y, choice.forward), (X, choice.dx), (W, choice.dw)):
            for who, route in ROUTES[stays].items():
                if (who, stays) not in there or who == target:
                    total += blocks[who] * (self.q - 1 + route.transposed)
                if (who == W and target == Y and form.keeps) or (who == Y and target == X and not form.streams):
                    there.add((who, stays))
        return total


@cache
def best_stationary(sizes: Sizes, form: Form) -> Stationary:
    """The choice that sends least; of equals, the papers'.

    It is made for the three products together, since what one gathered may serve the next. Only bytes count, not the
    number of calls, which would matter more for a small model over gloo.
    """
    choices = [Stationary(*each) for each in product((Y, X, W), repeat=3)]
    return min(choices, key=lambda choice: sizes.sent(choice, form))


def factors(target: str, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The two matrices whose product is the target."""
    if target == Y:
        return operands[X], operands[W]
    if target == X:
        return operands[Y], operands[W].t()
    return operands[X].t(), operands[Y]


class Summa:
    """The three products on this rank's row and column, panel by panel."""

    def __init__(self, mesh: Mesh, *, streams: bool, products: Products = PLAIN) -> None:
        """`streams`: operands in panels, instead of gathering them whole. `products`: of two panels."""
        self.q = mesh.size("row")
        self.streams, self.products = streams, products
        self._comms = {axis: mesh.comm(axis) for axis in ("row", "col")}
        self._plane = mesh.comm("row", "col")
        mirrored = mesh.grid.coordinates(mesh.rank) | {"row": mesh.index("col"), "col": mesh.index("row")}
        self._mirror = self._plane.ranks.index(mesh.grid.rank(mirrored))

    def transpose(self, x: Tensor) -> Tensor:
        """The block of rank (j, i)."""
        if self._mirror == self._plane.index:
            return x
        mine = x.contiguous()
        other = torch.empty_like(mine)
        self._plane.exchange(mine, self._mirror, other, self._mirror)
        return other

    def gather(self, who: str, stays: str, block: Tensor) -> Tensor:
        """All panels of an input [q, ...], as they arrive: joining them first would copy every operand once more."""
        route = ROUTES[stays][who]
        mine = (self.transpose(block) if route.transposed else block).contiguous()
        return all_rows(mine, self._comms[route.axis])

    def panels(self, who: str, stays: str, block: Tensor) -> Panels:
        """An input on its way, in whichever form."""
        return self._stream(who, stays, block) if self.streams else self.gather(who, stays, block)

    def multiply(self, target: str, stays: str, operands: dict[str, Panels | Tensor], out: Tensor | None) -> Moving:
        """The target's block. Operands: the staying one's block, the panels of the others.

        `out`: where the block should be; None: anywhere.
        """
        inputs = {
            who: repeat(held, self.q) if who == stays and isinstance(held, Tensor) else held
            for who, held in operands.items()
        }
        pairs = (
            factors(target, dict(zip(inputs, values, strict=True))) for values in zip(*inputs.values(), strict=False)
        )
        if target == stays:
            return here(self._accumulate(pairs, out))
        if self.streams:
            return self._reduce_panels(pairs, ROUTES[stays][target], out)
        return self.scatter(target, stays, self._stack(pairs), out)

    def _stream(self, who: str, stays: str, block: Tensor) -> Iterator[Tensor]:
        route = ROUTES[stays][who]
        comm = self._comms[route.axis]
        mine = (self.transpose(block) if route.transposed else block).contiguous()
        buffers = [torch.empty_like(mine), torch.empty_like(mine)]

        def start(panel: int) -> tuple[Tensor, Work]:
            x = mine if panel == comm.index else buffers[panel % 2]
            return x, comm.broadcast(x, panel, wait=False)

        coming = start(0)
        for panel in range(self.q):
            x, work = coming
            work.wait()
            if panel + 1 < self.q:
                coming = start(panel + 1)
            yield x

    def scatter(self, who: str, stays: str, panels: Tensor, out: Tensor | None = None) -> Moving:
        """The block of an output, the sum of every rank's panels [q, ...]; in `out`, where it is given."""
        route = ROUTES[stays][who]
        part = torch.empty_like(panels[0]) if out is None or route.transposed else out
        work = self._comms[route.axis].reduce_scatter(part, panels, wait=False)
        return Moving(work, lambda: self._home(part, route, out))

    def _reduce_panels(self, pairs: Iterable[tuple[Tensor, Tensor]], route: Route, out: Tensor | None) -> Moving:
        """Multiply a panel while the last one is summed."""
        comm = self._comms[route.axis]
        mine: Tensor | None = None
        last: Work | None = None
        for panel, (a, b) in enumerate(pairs):
            x = self.products.multiply(a, b)
            if last is not None:
                last.wait()
            last = comm.reduce(x, panel, wait=False)
            if panel == comm.index:
                mine = x
        assert mine is not None, f"{self.q} panels, and none of them ours"
        assert last is not None
        part = mine
        return Moving(last, lambda: self._home(part, route, out))

    def _home(self, part: Tensor, route: Route, out: Tensor | None) -> Tensor:
        """The block at the rank that it belongs to."""
        block = self.transpose(part) if route.transposed else part
        if out is None or block is out:
            return block
        return out.copy_(block)

    def _stack(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """The pairs' products, one after another [q, ...]."""
        panels: Tensor | None = None
        for panel, (a, b) in enumerate(pairs):
            if panels is None:
                panels = a.new_empty(self.q, a.shape[0], b.shape[1])
            self.products.multiply(a, b, out=panels[panel])
        assert panels is not None
        return panels

    def _accumulate(self, pairs: Iterable[tuple[Tensor, Tensor]], out: Tensor | None) -> Tensor:
        """The sum of the pairs' products."""
        total: Tensor | None = None
        for a, b in pairs:
            if total is not None:
                self.products.write_product(a, b, total, beta=1)
            else:
                total = self.products.multiply(a, b, out=out)
        assert total is not None
        return total
