"""Verbs of ranks that share a window (window.py): every member writes, all meet, every member reads.

| verb                         | a rank writes | meetings | then reads                                               |
|------------------------------|---------------|----------|----------------------------------------------------------|
| all-reduce, reduce: small    | all           | 1        | all of every member, and adds (reduce: only the root)    |
| all-reduce, reduce           | all           | 2        | own piece of every member; then all sums (reduce: root)  |
| reduce-scatter, all-to-all   | all           | 1        | own piece of every member                                |
| all-gather, gather           | own part      | 1        | all parts (gather: only the root)                        |
| broadcast, scatter: the root | all           | 1        | all; own piece                                           |
| all-reduce, in shared memory | nothing       | 3        | own piece of every member; then all sums                 |
| reduce-scatter, likewise     | nothing       | 2        | own piece of every member                                |

Several sums in shared memory (`Comm.zeros`) share the meetings, as far as every member has begun the sums by the first
meeting. With more ranks than cores a meeting waits for the last rank's turn on a core, and each bucket of a step would
otherwise need three meetings.

A sum adds values in member order, whatever the order of arrival: all members and all runs get equal bits. Half
precision is added in float32. Payloads larger than a slot are sent in pieces, one after another.

Messages of two ranks, and all-to-alls with unequal pieces, use the transport's own verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meshwright.ranks.comm import Later, RecordedComm, Work, size_bytes
from meshwright.ranks.ledger import VERBS
from meshwright.ranks.window import SLOT_BYTES, SharedWindow

HALF = (torch.float16, torch.bfloat16)

SMALL_BYTES = 2**16
"""Largest bytes of a payload that each rank sums whole, since a second meeting would cost more than the sum."""

CALLS = ("barrier", "assemble", *VERBS)
"""Verbs by number: all members of a meeting must run the same verb."""

ADDED_AT_ONCE = 2**14
"""Elements summed at once, so that the sum stays in a core's cache."""


@dataclass(frozen=True, eq=False)
class SumInPlace:
    """A sum of tensors in memory that all members can read. `everyones`: each member's tensor. `out`: receives this
    rank's piece of the sum. `returns`: other members' pieces are copied into this rank's tensor (all-reduce)."""

    everyones: list[Tensor]
    out: Tensor
    returns: bool


class WindowComm(RecordedComm):
    """The verbs over a group's window. A subclass runs the remaining verbs over a transport."""

    begins_when_waited_for = True
    window: SharedWindow
    _shared: list[tuple[Tensor, list[Tensor]]]
    """This rank's tensors in shared memory, each with every member's counterpart."""
    _begun: list[SumInPlace]
    """Sums not yet waited for, in the order in which all members begin them."""

    def _use(self, window: SharedWindow) -> None:
        self.window, self._shared, self._begun = window, [], []

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        everyones = [memory.view(dtype)[:count] for memory in self.window.share(max(1, count) * dtype.itemsize)]
        self._shared.append((everyones[self.index], everyones))
        return everyones[self.index]

    def _everyones(self, x: Tensor) -> list[Tensor] | None:
        """Return every member's x if x was allocated by `zeros`, else None."""
        return next(
            (all_ for local, all_ in self._shared if local.data_ptr() == x.data_ptr() and local.shape == x.shape), None
        )

    def _meet(self, verb: str, payload: Tensor | None = None) -> None:
        """Meet the members, which must run the same verb on payloads of equal size."""
        # Members compare one number: verb and bytes; 48 bits hold any payload.
        self.window.meet(CALLS.index(verb) << 48 | (0 if payload is None else size_bytes(payload)))

    def _barrier(self, *, asleep: bool = False) -> Work:
        return Later(lambda: self._meet("assemble" if asleep else "barrier"))

    def _begin_sum(self, begun: SumInPlace) -> Work:
        self._begun.append(begun)

        def finish() -> None:
            while begun in self._begun:  # an earlier wait may have done this sum already, or only sums before it
                self._sum_begun()

        return Later(finish)

    def _sum_begun(self) -> None:
        """Run the first n begun sums, with n the smallest number of begun sums of any member."""
        counts, first = self._written(torch.tensor([len(self._begun)])), self._begun[0]
        verb, local = "all_reduce" if first.returns else "reduce_scatter", first.everyones[self.index]
        self._meet(verb, local)
        # A member still in the backward pass has begun fewer sums; all members run the smallest number.
        together = min(int(count[0]) for count in counts)
        sums, self._begun = self._begun[:together], self._begun[together:]
        for each in sums:
            # Each rank sums one piece, 1/n of the work, in member order.
            add_up([self._split(values)[self.index] for values in each.everyones], each.out)
        if any(each.returns for each in sums):
            self._meet(verb, local)
        for each in sums:
            if each.returns:
                self._fetch(each.everyones[self.index], each.everyones)
        self._meet(verb, local)  # after it, the next backward pass may write there

    def _split(self, x: Tensor) -> list[Tensor]:
        """Split x [n] into one piece per member."""
        # Bounds by division: pieces differ by one element at most, whatever the size.
        bounds = [x.numel() * member // self.size for member in range(self.size + 1)]
        return [x[start:stop] for start, stop in pairwise(bounds)]

    def _fetch(self, x: Tensor, everyones: Sequence[Tensor]) -> None:
        """Fill x with each member's piece, read from that member's tensor."""
        for member, (piece, values) in enumerate(zip(self._split(x), map(self._split, everyones), strict=True)):
            if values[member].data_ptr() != piece.data_ptr():
                piece.copy_(values[member])

    def _sum(self, x: Tensor, root: int | None) -> Work:
        if root is None and (in_place := self._everyones(x)):
            return self._begin_sum(SumInPlace(in_place, self._split(in_place[self.index])[self.index], returns=True))
        verb, receives, flat = (
            "all_reduce" if root is None else "reduce",
            root in (None, self.index),
            x.detach().view(-1),
        )

        def run() -> None:
            for start, stop in self._pieces(x.numel(), x.element_size()):
                piece = flat[start:stop]
                everyones = [slot[: stop - start] for slot in self._written(piece)]
                self._meet(verb, piece)
                # This rank's slot holds the sum of its piece; the others copy the sum after the second meeting.
                if size_bytes(piece) > SMALL_BYTES:
                    terms = [self._split(values)[self.index] for values in everyones]
                    add_up(terms, terms[self.index])
                    self._meet(verb, piece)
                    if receives:
                        self._fetch(piece, everyones)
                elif receives:
                    add_up(everyones, piece)

        return Later(run)

    def _reduce_scatter(self, shard: Tensor, x: Tensor) -> Work:
        flat, pieces = shard.detach().view(-1), x.detach().view(self.size, -1)
        if everyones := self._everyones(x):
            return self._begin_sum(SumInPlace(everyones, flat, returns=False))

        def run() -> None:
            for start, stop in self._pieces(flat.numel(), x.element_size() * self.size):
                received = self._traded("reduce_scatter", pieces[:, start:stop])
                add_up(received, flat[start:stop])

        return Later(run)

    def _traded(self, verb: str, pieces: Tensor) -> list[Tensor]:
        """Exchange pieces [n, k] of every member; return this rank's piece of each."""
        slots = self._written(pieces)
        self._meet(verb, pieces)
        return [slot[: pieces.numel()].view_as(pieces)[self.index] for slot in slots]

    def _collect(self, x: Tensor, shard: Tensor, root: int | None) -> Work:
        def run() -> None:
            flat = shard.detach().view(-1)
            for start, stop in self._pieces(flat.numel(), flat.element_size()):
                slots = self._written(flat[start:stop])
                self._meet("all_gather" if root is None else "gather", flat[start:stop])
                if root in (None, self.index):
                    rows = x.detach().view(self.size, -1)[:, start:stop]
                    for row, slot in zip(rows, slots, strict=True):
                        row.copy_(slot[: stop - start])

        return Later(run)

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        def run() -> None:
            rows, sent = out.detach().view(self.size, -1), x.detach().view(self.size, -1)
            for start, stop in self._pieces(rows.shape[1], x.element_size() * self.size):
                for row, received in zip(
                    rows[:, start:stop], self._traded("all_to_all", sent[:, start:stop]), strict=True
                ):
                    row.copy_(received)

        return Later(run)

    def _broadcast(self, x: Tensor, root: int) -> Work:
        def run() -> None:
            flat = x.detach().view(-1)
            for start, stop in self._pieces(flat.numel(), x.element_size()):
                slot = self._from_root("broadcast", flat[start:stop], root)
                if self.index != root:
                    flat[start:stop] = slot[: stop - start]

        return Later(run)

    def _scatter(self, shard: Tensor, x: Tensor, root: int) -> Work:
        def run() -> None:
            flat, width = shard.detach().view(-1), shard.element_size() * self.size
            for start, stop in self._pieces(flat.numel(), width):
                sent = x.detach().view(self.size, -1)[:, start:stop] if self.index == root else flat
                slot = self._from_root("scatter", sent, root)
                flat[start:stop] = slot[: self.size * (stop - start)].view(self.size, -1)[self.index]

        return Later(run)

    def _from_root(self, verb: str, sent: Tensor, root: int) -> Tensor:
        """Write the root's `sent` to the root's slot; return that slot."""
        slot = self._written(sent)[root] if self.index == root else self.window.slots(sent.dtype)[root]
        self._meet(verb)
        return slot

    def _written(self, x: Tensor) -> list[Tensor]:
        """Write x to the start of this rank's slot; return all members' slots, readable after the next meeting."""
        slots = self.window.slots(x.dtype)
        slots[self.index][: x.numel()].view(x.shape).copy_(x)
        return slots

    def _pieces(self, count: int, width: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of runs of `count` elements of `width` bytes; each run fits a slot."""
        step = SLOT_BYTES // width
        assert step, f"axis {self.axis}: {width} bytes do not fit a slot"
        for start in range(0, count, step):
            yield start, min(count, start + step)


def add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Fill `out` with the sum of the parts, first to last. `out` may be one of the parts."""
    if len(parts) == 2 and out.dtype not in HALF:
        torch.add(*parts, out=out)
        return
    wide = torch.float32 if out.dtype in HALF else out.dtype
    for start in range(0, out.numel(), ADDED_AT_ONCE):
        first, second, *rest = (term[start : start + ADDED_AT_ONCE] for term in parts)
        # Half precision is widened at the first addition and rounded once, at the end.
        total = torch.add(first.to(wide), second)
        for term in rest:
            total += term
        out[start : start + ADDED_AT_ONCE] = total
