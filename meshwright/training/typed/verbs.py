"""Typing rules of the verbs between ranks (collectives and messages), over the axes of the group.

| verb                             | takes                       | gives                                               |
|----------------------------------|-----------------------------|-----------------------------------------------------|
| all_reduce                       | partial, varying, unknown   | whole                                               |
| reduce_scatter, reduce           | partial, varying, unknown   | varying: each rank's part; the root's sum           |
| all_gather, broadcast            | anything                    | whole                                               |
| scatter, gather, all_to_all      | anything                    | varying                                             |
| exchange, receive                | anything                    | unknown: a ring's turns are not followed            |

A sum of whole tensors counts the value once a rank, and a sum of cut tensors adds different parts: both are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.ranks.comm import DONE, Comm, Done, RankGroup, Sent, SoloComm, Work
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.transport import Transport
from meshwright.training.typed.operators import WrongSum
from meshwright.training.typed.sharding import Axes, Sharding, length, uncut
from meshwright.training.typed.watch import Watch


class TypedComm(SoloComm):
    """A group with verbs that send nothing and set the shardings of results. `axes`: the mesh axes of the group;
    `others`: the other axes."""

    def __init__(self, group: RankGroup, watch: Watch, axes: Axes, others: Axes) -> None:
        super().__init__(group)
        self.watch, self.axes, self.others = watch, axes, others
        self._given: dict[torch.Size, Sharding] = {}
        """Shardings of the tensors that this rank has broadcast, by shape."""

    def _addends(self, x: Tensor) -> None:
        """Raise WrongSum if the tensor is whole or cut over an axis of the group."""
        if not self.axes:  # groups that are no mesh axis (a pipeline's ends, copies of heads): addends differ
            return

        def look(sharding: Sharding, names: list[str]) -> Sharding:
            for axis in sorted(self.axes):
                word = "whole" if sharding.constant else sharding.word(axis)
                if word == "whole" and not sharding.constant:
                    shown = "what every rank holds whole is summed, so that it is counted once a rank"
                    raise WrongSum(axis, shown, "leave the sum out: it was made before, or nothing was split", names)
                if word == "cut":
                    shown = "different parts are summed, which are no addends of one value"
                    remedy = "gather them (all_gather), or sum over the axis that splits the tokens"
                    raise WrongSum(axis, shown, remedy, names)
            return sharding

        with self.watch.placing([self.watch.sharding(x)]):
            self.watch.change(x, look)

    def _sum(self, x: Tensor, root: int | None) -> Work:
        self._meet("all_reduce" if root is None else "reduce", x)
        self._addends(x)
        self.watch.change(x, lambda sharding, _: (sharding.settled if root is None else sharding.loosened)(self.axes))
        return DONE

    def _reduce_scatter(self, out: Tensor, x: Tensor, _: object = None, /) -> Done:
        self._meet("reduce_scatter", out, x)
        self._addends(x)
        sharding = self.watch.sharding(x)
        self.watch.say(out, _flat(sharding, out).loosened(self.axes))
        return DONE

    def _collect(self, x: Tensor, shard: Tensor, root: object = None, /) -> Done:
        if root is not None:
            return self._give("gather", x, shard)
        self._meet("all_gather", x, shard)
        sharding = self.watch.sharding(shard)
        row = sharding.settled(self.axes)
        if list(x.shape[1:]) == list(map(length, row.dims)):  # x: [n, *shape], each row of this sharding
            dims = ((x.shape[0], frozenset[str]()),), *row.dims
            self.watch.say(x, Sharding(dims, row.partial, row.varying, row.unknown, row.constant))
        else:
            self.watch.say(x, row.shaped(x.shape))
        if sharding.constant:
            # Parameters with gathered slices have the declared shardings again.
            for _, parameter, declared in self.watch.memory(x).declared:
                self.watch.say(parameter, declared)
        return DONE

    def _broadcast(self, x: Tensor, root: int | None, /) -> Work:
        self._meet("broadcast", x)
        if root == self.index:
            self.watch.change(x, lambda sharding, _: sharding.settled(self.axes))
            self._given[x.shape] = self.watch.sharding(x)
        elif self.size > 1:
            # The root's tensor is not on this rank. Its sharding is assumed equal to a tensor of the same shape that
            # this rank has broadcast as root. Without such a tensor, an untouched buffer may receive any sharding.
            sharding = self._given.get(x.shape, self.watch.sharding(x))
            unseen = Sharding(uncut(x.shape), unknown=self.others)
            self.watch.say(x, unseen if sharding.constant else sharding.settled(self.axes))
        return DONE

    def _scatter(self, out: Tensor, x: Tensor, _: object = None, /) -> Done:
        return self._give("scatter", out, x)

    def _all_to_all(self, out: Tensor, x: Tensor, _: object = None, /) -> Done:
        return self._give("all_to_all", out, x)

    _trade = _all_to_all

    def _message(self, sent: Sent, received: Sent) -> Work:
        if not received:
            self._meet("send", sent[0][0])
            return DONE
        into = received[0][0]
        x = sent[0][0] if sent else into
        self._meet("exchange", into, x)
        sharding = _flat(self.watch.sharding(x), into).settled(self.axes)
        self.watch.say(into, Sharding(sharding.dims, sharding.partial, sharding.varying, sharding.unknown | self.axes))
        return DONE

    def _give(self, verb: str, out: Tensor, x: Tensor) -> Done:
        """Type a verb that leaves different values on the ranks of the group."""
        self._meet(verb, out, x)
        # A rank without a part, such as a worker's side of a gather, may pass an empty tensor.
        sharding = self.watch.sharding(x) if x.numel() else Sharding(uncut(out.shape), constant=True)
        self.watch.say(out, _flat(sharding, out).loosened(self.axes))
        return DONE

    def _meet(self, verb: str, *tensors: Tensor) -> None:
        if self.size > 1:
            self.watch.meet(f"{verb} over {self.axis}", *tensors)


def _flat(sharding: Sharding, like: Tensor) -> Sharding:
    """Return the sharding in the shape of `like`; if the shapes differ, axes that cut a dim become `varying`."""
    return sharding if list(map(length, sharding.dims)) == list(like.shape) else sharding.shaped(like.shape)


@dataclass(frozen=True)
class TypedTransport(Transport):
    """The transport of a job that does not run, for following one rank's values."""

    watch: Watch
    grid: Grid

    def comm(self, group: RankGroup) -> Comm:
        several = frozenset(axis for axis in group.axis.split("+") if axis in self.grid.names)
        used = frozenset(axis for axis, size in self.grid.axes if size > 1)
        return TypedComm(group, self.watch, several & used, used - several)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        return Mailbox(group.axis)


def typed_mesh(grid: Grid, rank: int, token_axes: tuple[str, ...], watch: Watch) -> Mesh:
    """Build a rank's mesh of a job that does not run. Verbs on the mesh record shardings of results in `watch`."""
    transport = TypedTransport(watch, grid)
    return Mesh(grid, rank, torch.device("meta"), transport, token_axes, grid.world_size)
