"""Verbs between ranks, and what they make of kinds over the axes of their group.

| verb                             | takes                       | gives                                               |
|----------------------------------|-----------------------------|-----------------------------------------------------|
| all_reduce                       | partial, own, unknown       | whole                                               |
| reduce_scatter, reduce           | partial, own, unknown       | own: a part each; the root's                        |
| all_gather, broadcast            | anything                    | whole                                               |
| scatter, gather, all_to_all      | anything                    | own                                                 |
| exchange, receive                | anything                    | unknown: a ring's turns are not followed            |

A sum of what is whole counts it once a rank, and one of what is cut adds different parts: both are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.ranks.comm import DONE, Comm, PieceSizes, RankGroup, SoloComm, Work
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox, SoloMailbox
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.transport import Transport
from meshwright.typed.kinds import Axes, Kind, constant, length, uncut
from meshwright.typed.operators import WrongSum
from meshwright.typed.watch import Watch


class TypedComm(SoloComm):
    """A group whose verbs move nothing, and tell what becomes of their tensors."""

    def __init__(self, group: RankGroup, watch: Watch, axes: Axes, others: Axes) -> None:
        super().__init__(group)
        self.watch, self.axes, self.others = watch, axes, others
        self._given: dict[torch.Size, Kind] = {}
        """The kinds of what this rank has broadcast, by shape."""

    def _sum(self, x: Tensor) -> None:
        """Refuse a sum that means nothing."""
        if not self.axes:  # the ends of a pipeline, the copies of heads: each rank's addend is its own
            return

        def look(kind: Kind, names: list[str]) -> Kind:
            for axis in sorted(self.axes):
                word = "whole" if kind.constant else kind.word(axis)
                if word == "whole" and not kind.constant:
                    shown = "what every rank holds whole is summed, so that it is counted once a rank"
                    raise WrongSum(axis, shown, "leave the sum out: it was made before, or nothing was split", names)
                if word == "cut":
                    shown = "different parts are summed, which are no addends of one value"
                    remedy = "gather them (all_gather), or sum over the axis that splits the tokens"
                    raise WrongSum(axis, shown, remedy, names)
            return kind

        with self.watch.placing([self.watch.kind(x)]):
            self.watch.change(x, look)

    def _whole(self, kind: Kind, names: Sequence[str] = ()) -> Kind:
        return kind.settled(self.axes)

    def _all_reduce(self, x: Tensor) -> Work:
        self._meet("all_reduce", x)
        self._sum(x)
        self.watch.change(x, self._whole)
        return DONE

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        self._meet("reduce_scatter", part, x)
        self._sum(x)
        kind = self.watch.kind(x)
        self.watch.say(part, _flat(kind, part).loosened(self.axes))
        return DONE

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        self._meet("all_gather", x, part)
        kind = self.watch.kind(part)
        row = self._whole(kind)
        if list(x.shape[1:]) == list(map(length, row.dims)):  # x: [n, *shape], of which each row is of this kind
            dims = ((x.shape[0], frozenset[str]()),), *row.dims
            self.watch.say(x, Kind(dims, row.partial, row.own, row.unknown, row.constant))
        else:
            self.watch.say(x, row.shaped(x.shape))
        if kind.constant:
            self.watch.restore(x)
        return DONE

    def _broadcast(self, x: Tensor, root: int) -> Work:
        self._meet("broadcast", x)
        if root == self.index:
            self.watch.change(x, self._whole)
            self._given[x.shape] = self.watch.kind(x)
        elif self.size > 1:
            # The root's tensor is not here. What this rank gives the others in its turn is like it; before that its
            # memory is what others may fill with anything.
            kind = self._given.get(x.shape, self.watch.kind(x))
            unseen = Kind(uncut(x.shape), unknown=self.others)
            self.watch.say(x, unseen if kind.constant else self._whole(kind))
        return DONE

    def _reduce(self, x: Tensor, root: int) -> Work:
        self._meet("reduce", x)
        self._sum(x)
        self.watch.change(x, lambda kind, _: kind.loosened(self.axes))
        return DONE

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        self._meet("gather", x, part)
        self._give(x, part)
        return DONE

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        self._meet("scatter", part, x)
        self._give(part, x)
        return DONE

    def _all_to_all(self, out: Tensor, x: Tensor, pieces: PieceSizes | None) -> Work:
        self._meet("all_to_all", out, x)
        self._give(out, x)
        return DONE

    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> Work:
        self.pass_on(x, into)
        return DONE

    def pass_on(self, x: Tensor, into: Tensor) -> None:
        """A message from one rank to another: nobody says whose turn it is."""
        self._meet("exchange", into, x)
        kind = _flat(self.watch.kind(x), into).settled(self.axes)
        self.watch.say(into, Kind(kind.dims, kind.partial, kind.own, kind.unknown | self.axes))

    def _receive(self, x: Tensor, source: int) -> None:
        self.pass_on(x, x)

    def _send(self, x: Tensor, to: int) -> None:
        self._meet("send", x)

    def _give(self, out: Tensor, x: Tensor) -> None:
        """Each rank gets something else."""
        # A rank that has no part of it, such as a worker's side of a gather, may hand over nothing.
        kind = self.watch.kind(x) if x.numel() else constant(out.shape)
        self.watch.say(out, _flat(kind, out).loosened(self.axes))

    def _meet(self, verb: str, *tensors: Tensor) -> None:
        if self.size > 1:
            self.watch.meet(f"{verb} over {self.axis}", *tensors)


def _flat(kind: Kind, like: Tensor) -> Kind:
    """The kind of memory of another form: cut, but along which dim is not known."""
    return kind if list(map(length, kind.dims)) == list(like.shape) else kind.shaped(like.shape)


@dataclass(frozen=True)
class TypedTransport(Transport):
    """A job that does not run, of which one rank's values are followed."""

    watch: Watch
    grid: Grid

    def comm(self, group: RankGroup) -> Comm:
        several = frozenset(axis for axis in group.axis.split("+") if axis in self.grid.names)
        used = frozenset(axis for axis, size in self.grid.axes if size > 1)
        return TypedComm(group, self.watch, several & used, used - several)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        return SoloMailbox(group.axis)


def typed_mesh(grid: Grid, rank: int, token_axes: tuple[str, ...], watch: Watch) -> Mesh:
    """A rank's mesh of a job that does not run, whose verbs tell `watch` what they make."""
    transport = TypedTransport(watch, grid)
    return Mesh(grid, rank, torch.device("meta"), transport, token_axes, "cpu", grid.world_size)
