"""Verbs and mailbox of ranks that are threads of one process (thread_world.py): copies in host or GPU memory.

Each rank passes tensors to the group's next call. The last calling member moves and adds the data of all members. A sum
adds values in member order, whatever the order of arrival; half precision is added in float32. Messages are copied into
a queue when sent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.ranks.board import Board
from meshwright.ranks.comm import DONE, Comm, Later, PieceSizes, Posted, RankGroup, RecordedComm, Sent, Work
from meshwright.ranks.mailbox import Mailbox, PackedMailbox, Packet, Side
from meshwright.ranks.thread_world import Act, Meeting, ThreadWorld
from meshwright.ranks.transport import Transport
from meshwright.ranks.window_comm import add_up

_OPPOSITE: dict[Side, Side] = {"before": "after", "after": "before"}


def _flat(x: Tensor) -> Tensor:
    """View the tensor's memory as a flat tensor without autograd, as a library would receive data."""
    return x.data.view(-1)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


@dataclass(frozen=True)
class _Arrival:
    """Work that is done when all members have called."""

    world: ThreadWorld
    rank: int
    meeting: Meeting
    ordinal: int

    def is_completed(self) -> bool:
        return self.meeting.ended > self.ordinal

    def wait(self) -> None:
        self.world.wait(self.rank, self.is_completed)


class ThreadComm(RecordedComm):
    """The verbs of a group of threads. `name`: the group's name, unique in the world."""

    def __init__(self, group: RankGroup, world: ThreadWorld, name: object) -> None:
        super().__init__(group)
        self.world, self.rank, self._name = world, group.ranks[group.index], name
        self._meeting, self._calls = world.meetings.setdefault(name, Meeting(self.size)), itertools.count()
        self._sent, self._received = ([itertools.count() for _ in group.ranks] for _ in range(2))

    def _meet(self, verb: str, given: object, act: Act) -> Posted:
        # A member's own count: the n-th calls of all members are one collective.
        ordinal = next(self._calls)
        if self._meeting.come(ordinal, verb, self.index, given, act):
            self.world.wake(self.ranks)
            return DONE
        return _Arrival(self.world, self.rank, self._meeting, ordinal)

    def _barrier(self, *, asleep: bool = False) -> Work:
        return DONE if asleep else self._meet("barrier", None, lambda given: None)

    def _sum(self, x: Tensor, root: int | None) -> Work:
        def act(everyones: Sequence[Tensor]) -> None:
            # Summed in the first receiver's memory; the sum is copied to the other receivers.
            total = everyones[root or 0]
            add_up(everyones, total)
            for receiver in everyones if root is None else ():
                _copy(receiver, total)

        return self._meet("all_reduce" if root is None else "reduce", _flat(x), act)

    def _reduce_scatter(self, shard: Tensor, x: Tensor) -> Work:
        def act(given: Sequence[tuple[Tensor, Tensor]]) -> None:
            for member, (target, _) in enumerate(given):
                add_up([each.view(len(given), -1)[member] for _, each in given], target)

        return self._meet("reduce_scatter", (_flat(shard), _flat(x)), act)

    def _collect(self, x: Tensor, shard: Tensor, root: int | None) -> Work:
        def act(given: Sequence[tuple[Tensor, Tensor]]) -> None:
            for whole, _ in given if root is None else [given[root]]:
                for row, (_, sent) in zip(whole.view(len(given), -1), given, strict=True):
                    _copy(row, sent)

        return self._meet("all_gather" if root is None else "gather", (_flat(x), _flat(shard)), act)

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        equal = (x.numel() // self.size,) * self.size
        return self._trade(out, x, PieceSizes(equal, equal))

    def _trade(self, out: Tensor, x: Tensor, pieces: PieceSizes) -> Posted:
        def act(given: Sequence[tuple[Tensor, Tensor, PieceSizes]]) -> None:
            # Piece j of member i's x becomes piece i of member j's out.
            sent = [x.split(list(sizes.sent)) for _, x, sizes in given]
            for member, (target, _, sizes) in enumerate(given):
                for piece, theirs in zip(target.split(list(sizes.received)), sent, strict=True):
                    piece.copy_(theirs[member])

        return self._meet("all_to_all", (_flat(out), _flat(x), pieces), act)

    def _broadcast(self, x: Tensor, root: int) -> Work:
        def act(everyones: Sequence[Tensor]) -> None:
            for receiver in everyones:
                _copy(receiver, everyones[root])

        return self._meet("broadcast", _flat(x), act)

    def _scatter(self, shard: Tensor, x: Tensor, root: int) -> Work:
        def act(given: Sequence[tuple[Tensor, Tensor]]) -> None:
            pieces = given[root][1].view(len(given), -1)
            for piece, (target, _) in zip(pieces, given, strict=True):
                _copy(target, piece)

        return self._meet("scatter", (_flat(shard), _flat(x)), act)

    def _message(self, sent: Sent, received: Sent) -> Work:
        letters = self.world.letters
        for x, to in sent:
            # A copy, since the sender may change the tensor before the receiver's turn.
            letters[self._name, self.index, to, next(self._sent[to])] = _flat(x).clone()
            self.world.wake([self.ranks[to]])
        # Numbered now, not in wait(): of several pending receives, each takes the source's next tensor.
        awaited = [(into, (self._name, source, self.index, next(self._received[source]))) for into, source in received]

        def receive() -> None:
            self.world.wait(self.rank, lambda: all(address in letters for _, address in awaited))
            for into, address in awaited:
                _flat(into).copy_(letters.pop(address))

        return Later(receive)


class ThreadMailbox(PackedMailbox):
    """A mailbox with one queue per receiving rank. `name`: the axis's name, unique in the world."""

    # No header in the buffer: reading one from GPU memory would make the host wait for the device.
    header_bytes = 0

    def __init__(self, group: RankGroup, world: ThreadWorld, name: object) -> None:
        super().__init__(group, world.device)
        self.world, self.rank = world, group.ranks[group.index]
        self._inbox: deque[Packet] = world.queues[name, self.rank]
        self._outboxes = {side: world.queues[name, rank] for side, rank in self.neighbours.items()}

    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None:
        self._outboxes[to].append(Packet(_OPPOSITE[to], header, buffer))
        self.world.wake([self.neighbours[to]])

    def _arrived(self) -> list[Packet]:
        # A queue needs no posted receives. Their number still limits the messages taken: a neighbour may be an epoch
        # ahead, and messages of the next epoch must wait.
        may_come, taken, left = dict(self._posted), [], []
        for packet in self._inbox:
            if may_come[packet.side]:
                may_come[packet.side] -= 1
                taken.append(packet)
            else:
                left.append(packet)
        self._inbox.clear()
        self._inbox.extend(left)
        return taken

    def _next_arrivals(self) -> list[Packet]:
        self.world.wait(self.rank, lambda: any(self._posted[packet.side] for packet in self._inbox))
        return self._arrived()


@dataclass(frozen=True)
class ThreadTransport(Transport):
    """Comms and mailboxes of the rank `rank` of a world."""

    world: ThreadWorld
    rank: int

    def comm(self, group: RankGroup) -> Comm:
        name = ("comm", group.axis, group.tag, group.ranks)
        return super().comm(group) if len(group.ranks) == 1 else ThreadComm(group, self.world, name)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        name = ("mailbox", group.axis, group.tag, group.ranks)
        return super().mailbox(group, device) if len(group.ranks) == 1 else ThreadMailbox(group, self.world, name)

    def board(self, folder: Path) -> Board:
        return self.world.board

    def aside(self) -> AbstractContextManager[None]:
        return self.world.aside(self.rank)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        self.world.wait(self.rank, ready)
