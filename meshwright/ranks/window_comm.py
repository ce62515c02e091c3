"""The verbs of ranks that share a window (window.py): everyone writes, all meet, everyone reads.

| verb                         | a rank writes | meetings | then it reads                                           |
|------------------------------|---------------|----------|---------------------------------------------------------|
| all-reduce, reduce: small    | all           | 1        | all of everybody's, and adds it up (reduce: the root)   |
| all-reduce, reduce           | all           | 2        | its piece of everybody's; then all sums (or: the root)  |
| reduce-scatter, all-to-all   | all           | 1        | its piece of everybody's                                |
| all-gather, gather           | its part      | 1        | everybody's (gather: the root)                          |
| broadcast, scatter: the root | all           | 1        | all; its piece                                          |

A sum adds the members' values in their order, whoever came first: its bits are the same on all of them and in every
run. Half precision is added in float32. Payloads beyond a slot go in pieces, one behind the other.

What two ranks send each other, and all-to-alls of unequal pieces, stay the transport's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from meshwright.ranks.comm import Later, PieceSizes, RecordedComm, Work, size_bytes
from meshwright.ranks.window import SLOT_BYTES, SharedWindow

HALF = (torch.float16, torch.bfloat16)

SMALL_BYTES = 2**16
"""Up to here each rank adds up all for itself: a meeting costs more than the sum."""

ADDED_AT_ONCE = 2**14
"""Elements that are added up at once: what is added to stays in a core's cache."""


class WindowComm(RecordedComm):
    """`window`: of this very group. A subclass has the verbs that are left, over its own transport."""

    begins_when_waited_for = True
    window: SharedWindow
    _shared: list[tuple[Tensor, list[Tensor]]]
    """Tensors of this rank's that lie in shared memory, with every member's."""

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        everyones = [memory.view(dtype)[:count] for memory in self.window.share(max(1, count) * dtype.itemsize)]
        self._shared.append((everyones[self.index], everyones))
        return everyones[self.index]

    def _everyones(self, x: Tensor) -> list[Tensor] | None:
        """Every member's x, where it is memory that `zeros` gave."""
        return next(
            (all_ for own, all_ in self._shared if own.data_ptr() == x.data_ptr() and own.shape == x.shape), None
        )

    def _barrier(self) -> Work:
        return Later(self.window.meet)

    def _assemble(self) -> Work:
        return Later(self.window.meet)

    def _all_reduce(self, x: Tensor) -> Work:
        if everyones := self._everyones(x):
            return Later(lambda: self._sum_in_place(everyones))
        return Later(lambda: self._sum(x.detach().view(-1), range(self.size)))

    def _sum_in_place(self, everyones: Sequence[Tensor]) -> None:
        """Sum what all can read where it lies."""
        self.window.meet()
        self._sum_pieces(everyones[self.index], everyones, receives=True)
        self.window.meet()

    def _reduce(self, x: Tensor, root: int) -> Work:
        return Later(lambda: self._sum(x.detach().view(-1), [root]))

    def _sum(self, x: Tensor, receivers: Sequence[int]) -> None:
        """Sum x [n] into the x of the receivers; the others' stays, or becomes partly so."""
        for start, stop in self._pieces(x.numel(), x.element_size()):
            piece = x[start:stop]
            everyones = [slot[: stop - start] for slot in self._written(piece)]
            self.window.meet()
            if size_bytes(piece) > SMALL_BYTES:
                self._sum_pieces(piece, everyones, receives=self.index in receivers)
            elif self.index in receivers:
                add_up(everyones, piece)

    def _sum_pieces(self, x: Tensor, everyones: Sequence[Tensor], *, receives: bool) -> None:
        """Each member sums its piece of everyone's values; then x gets all sums, where it receives."""
        bounds = [x.numel() * member // self.size for member in range(self.size + 1)]
        pieces = [slice(*pair) for pair in pairwise(bounds)]
        own = pieces[self.index]
        add_up([values[own] for values in everyones], everyones[self.index][own])
        self.window.meet()
        for piece, values in zip(pieces, everyones, strict=True):
            if receives and values[piece].data_ptr() != x[piece].data_ptr():
                x[piece] = values[piece]

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        own, pieces = part.detach().view(-1), x.detach().view(self.size, -1)
        if everyones := self._everyones(x):
            return Later(lambda: self._sum_piece_in_place(own, everyones))

        def run() -> None:
            for start, stop in self._pieces(own.numel(), x.element_size() * self.size):
                received = self._traded(pieces[:, start:stop])
                add_up(received, own[start:stop])

        return Later(run)

    def _sum_piece_in_place(self, part: Tensor, everyones: Sequence[Tensor]) -> None:
        self.window.meet()
        add_up([values.view(self.size, -1)[self.index] for values in everyones], part)
        self.window.meet()

    def _traded(self, pieces: Tensor) -> list[Tensor]:
        """This rank's piece of every member's pieces [n, k]."""
        slots = self._written(pieces)
        self.window.meet()
        return [slot[: pieces.numel()].view_as(pieces)[self.index] for slot in slots]

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        return self._gathered(x, part, range(self.size))

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        return self._gathered(x, part, [root])

    def _gathered(self, x: Tensor, part: Tensor, receivers: Sequence[int]) -> Work:
        def run() -> None:
            own = part.detach().view(-1)
            for start, stop in self._pieces(own.numel(), own.element_size()):
                slots = self._written(own[start:stop])
                self.window.meet()
                if self.index in receivers:
                    rows = x.detach().view(self.size, -1)[:, start:stop]
                    for row, slot in zip(rows, slots, strict=True):
                        row.copy_(slot[: stop - start])

        return Later(run)

    def _all_to_all(self, out: Tensor, x: Tensor, pieces: PieceSizes | None) -> Work:
        if pieces is not None:
            return super()._all_to_all(out, x, pieces)  # type: ignore[safe-super]  # the transport's

        def run() -> None:
            rows, sent = out.detach().view(self.size, -1), x.detach().view(self.size, -1)
            for start, stop in self._pieces(rows.shape[1], x.element_size() * self.size):
                for row, received in zip(rows[:, start:stop], self._traded(sent[:, start:stop]), strict=True):
                    row.copy_(received)

        return Later(run)

    def _broadcast(self, x: Tensor, root: int) -> Work:
        def run() -> None:
            flat = x.detach().view(-1)
            for start, stop in self._pieces(flat.numel(), x.element_size()):
                slot = self._from_root(flat[start:stop], root)
                if self.index != root:
                    flat[start:stop] = slot[: stop - start]

        return Later(run)

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        def run() -> None:
            own, width = part.detach().view(-1), part.element_size() * self.size
            for start, stop in self._pieces(own.numel(), width):
                sent = x.detach().view(self.size, -1)[:, start:stop] if self.index == root else own
                slot = self._from_root(sent, root)
                own[start:stop] = slot[: self.size * (stop - start)].view(self.size, -1)[self.index]

        return Later(run)

    def _from_root(self, sent: Tensor, root: int) -> Tensor:
        """The root's slot, in which its `sent` lies."""
        slot = self._written(sent)[root] if self.index == root else self.window.slots(sent.dtype)[root]
        self.window.meet()
        return slot

    def _written(self, x: Tensor) -> list[Tensor]:
        """All members' slots, of which this rank's begins with x. They may be read when all have met."""
        slots = self.window.slots(x.dtype)
        slots[self.index][: x.numel()].view(x.shape).copy_(x)
        return slots

    def _pieces(self, count: int, width: int) -> Iterator[tuple[int, int]]:
        """start, stop of runs of `count` things of `width` bytes that fit a slot."""
        step = SLOT_BYTES // width
        assert step, f"axis {self.axis}: {width} bytes do not fit a slot"
        for start in range(0, count, step):
            yield start, min(count, start + step)


def add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Fill `out` with the sum of the parts, from first to last. One of the parts may be `out` itself."""
    wide = torch.float32 if out.dtype in HALF else out.dtype
    for start in range(0, out.numel(), ADDED_AT_ONCE):
        first, second, *rest = (part[start : start + ADDED_AT_ONCE] for part in parts)
        total = torch.add(first.to(wide), second)
        for part in rest:
            total += part
        out[start : start + ADDED_AT_ONCE] = total
