"""Products of matrices in q x q blocks over (row, col): Y = X W, dX = dY Wᵀ, dW = Xᵀ dY.

Rank (i, j) holds block (i, j) of each: X [b/q, H/q], W [H/q, N/q], Y [b/q, N/q]. (With a depth, b counts the rows of
one depth slice, and each slice multiplies alone: Tesseract, ICPP 2022.) In each of the three products one matrix is
stationary and two are sent: inputs to the ranks that multiply, outputs to the ranks of the blocks. A matrix is sent in
q panels, indexed by the dim that the stationary matrix does not have:

| stationary | panels over | X is sent            | W is sent            | Y is sent |
|------------|-------------|----------------------|----------------------|-----------|
| Y          | H           | over col             | over row             | -         |
| W          | b           | transposed, then col | -                    | over row  |
| X          | N           | -                    | transposed, then row | over col  |

(The papers' SUMMA loops always have the first row: Y stationary in Y = X W, dY in dX and in dW.) "Over col": an
all-gather of an input, a reduce-scatter of an output. The streaming form has q broadcasts or reductions of one panel;
each starts while the previous panel is multiplied. "Transposed": ranks (i, j) and (j, i) first exchange blocks.
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
"""q tensors of one block's shape. An iterator may yield a tensor as soon as it is received, and reuses its memory after
the next tensor."""


@dataclass(frozen=True)
class Route:
    """The way of a matrix that is sent."""

    axis: str
    """The axis of the collective."""
    transposed: bool
    """True if ranks (i, j) and (j, i) exchange blocks, before an input is gathered or after an output is reduced."""


ROUTES = {
    Y: {X: Route("col", False), W: Route("row", False)},
    W: {X: Route("col", True), Y: Route("row", False)},
    X: {W: Route("row", True), Y: Route("col", False)},
}
"""By the stationary matrix, then by the matrix that is sent."""


@dataclass(frozen=True)
class Stationary:
    """The stationary matrix (X, W or Y) in the forward product, in dX and in dW; the other two are sent."""

    forward: str
    dx: str
    dw: str


@dataclass(frozen=True)
class Form:
    """The form of 2-D products."""

    streams: bool
    """True if operands are sent panel by panel."""
    keeps: bool
    """True if gathered weights are kept for the whole step."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a rank's blocks."""

    rows: int
    """Rows of X and Y."""
    inputs: int
    """Columns of X."""
    outputs: int
    """Columns of Y."""
    q: int
    """Number of ranks of a row or column."""

    def sent(self, choice: Stationary, form: Form) -> int:
        """Return the number of elements that a rank off the diagonal sends for the three products.

        A gathered operand may serve a later product: the weight in dX if weights are kept, dY in dW unless in panels.
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
    """Return the stationary matrices with the fewest elements sent; of equal choices, the papers'.

    The choice covers the three products together, since an operand gathered for one may serve the next. The number of
    calls is not counted, though it would matter more for a small model over gloo.
    """
    choices = [Stationary(*each) for each in product((Y, X, W), repeat=3)]
    return min(choices, key=lambda choice: sizes.sent(choice, form))


def factors(target: str, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the two matrices with the product `target`."""
    if target == Y:
        return operands[X], operands[W]
    if target == X:
        return operands[Y], operands[W].t()
    return operands[X].t(), operands[Y]


class Summa:
    """The three products over this rank's row and column of ranks, panel by panel."""

    def __init__(self, mesh: Mesh, *, streams: bool, products: Products = PLAIN) -> None:
        """Make the products. `streams`: send operands panel by panel, instead of whole; `products`: of two panels."""
        self.q = mesh.size("row")
        self.streams, self.products = streams, products
        self._comms = {axis: mesh.comm(axis) for axis in ("row", "col")}
        self._plane = mesh.comm("row", "col")
        mirrored = mesh.grid.coordinates(mesh.rank) | {"row": mesh.index("col"), "col": mesh.index("row")}
        self._mirror = self._plane.ranks.index(mesh.grid.rank(mirrored))

    def transpose(self, x: Tensor) -> Tensor:
        """Exchange blocks with rank (j, i); returns the block of that rank."""
        if self._mirror == self._plane.index:
            return x
        mine = x.contiguous()
        mirrored = torch.empty_like(mine)
        self._plane.exchange(mine, self._mirror, mirrored, self._mirror)
        return mirrored

    def gather(self, who: str, stays: str, block: Tensor) -> Tensor:
        """Gather all panels of an input, [q, ...]. Panels are not joined, since that would copy every operand."""
        route = ROUTES[stays][who]
        mine = (self.transpose(block) if route.transposed else block).contiguous()
        return all_rows(mine, self._comms[route.axis])

    def panels(self, who: str, stays: str, block: Tensor) -> Panels:
        """Return the panels of an input: an iterator if operands stream, else a tensor [q, ...]."""
        return self._stream(who, stays, block) if self.streams else self.gather(who, stays, block)

    def multiply(self, target: str, stays: str, operands: dict[str, Panels | Tensor], out: Tensor | None) -> Moving:
        """Compute this rank's block of a product.

        Args:
            target: the matrix to compute.
            stays: the stationary matrix.
            operands: by matrix: this rank's block of the stationary one, the panels of others.
            out: memory for the block; None: new memory.
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
        """Begin to reduce-scatter the panels [q, ...] of an output to this rank's block; into `out`, if given."""
        route = ROUTES[stays][who]
        reduced = torch.empty_like(panels[0]) if out is None or route.transposed else out
        work = self._comms[route.axis].reduce_scatter(reduced, panels, wait=False)
        return Moving(work, lambda: self._home(reduced, route, out))

    def _reduce_panels(self, pairs: Iterable[tuple[Tensor, Tensor]], route: Route, out: Tensor | None) -> Moving:
        """Multiply each panel while the previous panel is reduced."""
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
        reduced = mine
        return Moving(last, lambda: self._home(reduced, route, out))

    def _home(self, reduced: Tensor, route: Route, out: Tensor | None) -> Tensor:
        """Return the block on the rank that holds it, in `out` if given."""
        block = self.transpose(reduced) if route.transposed else reduced
        if out is None or block is out:
            return block
        return out.copy_(block)

    def _stack(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the products of the pairs, stacked [q, ...]."""
        panels: Tensor | None = None
        for panel, (a, b) in enumerate(pairs):
            if panels is None:
                panels = a.new_empty(self.q, a.shape[0], b.shape[1])
            self.products.multiply(a, b, out=panels[panel])
        assert panels is not None
        return panels

    def _accumulate(self, pairs: Iterable[tuple[Tensor, Tensor]], out: Tensor | None) -> Tensor:
        """Return the sum of the pairs' products."""
        total: Tensor | None = None
        for a, b in pairs:
            if total is not None:
                self.products.write_product(a, b, total, beta=1)
            else:
                total = self.products.multiply(a, b, out=out)
        assert total is not None
        return total
