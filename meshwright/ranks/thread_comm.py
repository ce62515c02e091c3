"""The verbs and the mailbox of ranks that are threads of one process (thread_world.py): copies in its memory,
or in the memory of its GPU.

Each rank hands its tensors to its group's next call; the last member to come moves and adds for all. A sum adds values
in the members' order, half precision in float32, whatever the order of arrival. Messages are copied into a queue when
sent.
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
from meshwright.ranks.comm import DONE, Comm, Later, PieceSizes, Posted, RankGroup, RecordedComm, SoloComm, Work
from meshwright.ranks.mailbox import Mailbox, PackedMailbox, Packet, Side, SoloMailbox
from meshwright.ranks.thread_world import Act, Meeting, ThreadWorld
from meshwright.ranks.transport import Transport
from meshwright.ranks.window_comm import add_up

_OPPOSITE: dict[Side, Side] = {"before": "after", "after": "before"}


def _flat(x: Tensor) -> Tensor:
    """The tensor's memory as a flat tensor without autograd, as a library would receive into it."""
    return x.data.view(-1)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _sum_to(receivers: Sequence[int]) -> Act:
    def act(everyones: Sequence[Tensor]) -> None:
        # Summed in the first receiver's memory; the other receivers get a copy of its bits.
        first, *others = receivers
        add_up(everyones, everyones[first])
        for member in others:
            everyones[member].copy_(everyones[first])

    return act


def _gather_to(receivers: Sequence[int]) -> Act:
    def act(given: Sequence[tuple[Tensor, Tensor]]) -> None:
        for member in receivers:
            for row, (_, part) in zip(given[member][0].view(len(given), -1), given, strict=True):
                _copy(row, part)

    return act


@dataclass(frozen=True)
class _Arrival:
    """Work that is done when all members have come to the call."""

    world: ThreadWorld
    rank: int
    meeting: Meeting
    number: int

    def is_done(self) -> bool:
        return self.meeting.ended > self.number

    def wait(self) -> None:
        self.world.wait(self.rank, self.is_done)


class ThreadComm(RecordedComm):
    """`name`: the group's, unique in its world."""

    def __init__(self, group: RankGroup, world: ThreadWorld, name: object) -> None:
        super().__init__(group)
        self.world, self.rank, self._name = world, group.ranks[group.index], name
        self._meeting, self._calls = world.meeting(name, self.size), itertools.count()
        self._sent, self._received = ([itertools.count() for _ in group.ranks] for _ in range(2))

    def _meet(self, verb: str, given: object, act: Act) -> Posted:
        # A member's own count: the n-th calls of all members are one collective.
        number = next(self._calls)
        if self._meeting.come(number, verb, self.index, given, act):
            self.world.wake(self.ranks)
            return DONE
        return _Arrival(self.world, self.rank, self._meeting, number)

    def _barrier(self) -> Work:
        return self._meet("barrier", None, lambda given: None)

    def _all_reduce(self, x: Tensor) -> Work:
        return self._meet("all_reduce", _flat(x), _sum_to(range(self.size)))

    def _reduce(self, x: Tensor, root: int) -> Work:
        return self._meet("reduce", _flat(x), _sum_to([root]))

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        def act(given: Sequence[tuple[Tensor, Tensor]]) -> None:
            for member, (own, _) in enumerate(given):
                add_up([each.view(len(given), -1)[member] for _, each in given], own)

        return self._meet("reduce_scatter", (_flat(part), _flat(x)), act)

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        return self._meet("all_gather", (_flat(x), _flat(part)), _gather_to(range(self.size)))

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        return self._meet("gather", (_flat(x), _flat(part)), _gather_to([root]))

    def _post_all_to_all(self, out: Tensor, x: Tensor, pieces: PieceSizes) -> Posted:
        return self._all_to_all(out, x, pieces)

    def _all_to_all(self, out: Tensor, x: Tensor, pieces: PieceSizes | None) -> Posted:
        def act(given: Sequence[tuple[Tensor, Tensor, PieceSizes | None]]) -> None:
            # Piece j of member i's x becomes piece i of member j's out.
            equal = [[x.numel() // len(given)] * len(given) for _, x, _ in given]
            sent = [x.split(list(s.sent) if s else each) for (_, x, s), each in zip(given, equal, strict=True)]
            for member, (own, _, sizes) in enumerate(given):
                received = own.split(list(sizes.received) if sizes else equal[member])
                for piece, theirs in zip(received, sent, strict=True):
                    piece.copy_(theirs[member])

        return self._meet("all_to_all", (_flat(out), _flat(x), pieces), act)

    def _broadcast(self, x: Tensor, root: int) -> Work:
        def act(everyones: Sequence[Tensor]) -> None:
            for own in everyones:
                _copy(own, everyones[root])

        return self._meet("broadcast", _flat(x), act)

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        def act(given: Sequence[tuple[Tensor, Tensor]]) -> None:
            pieces = given[root][1].view(len(given), -1)
            for piece, (own, _) in zip(pieces, given, strict=True):
                _copy(own, piece)

        return self._meet("scatter", (_flat(part), _flat(x)), act)

    def _send(self, x: Tensor, to: int) -> None:
        # A copy: the sender may change its tensor before the receiver's turn comes.
        self.world.letters[self._name, self.index, to, next(self._sent[to])] = _flat(x).clone()
        self.world.wake([self.ranks[to]])

    def _receive(self, x: Tensor, source: int) -> None:
        self._awaited(x, source).wait()

    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> Work:
        self._send(x, to)
        return self._awaited(into, source)

    def _awaited(self, into: Tensor, source: int) -> Work:
        """The number of the source's next tensor that nobody awaits yet."""
        letters, address = self.world.letters, (self._name, source, self.index, next(self._received[source]))

        def receive() -> None:
            self.world.wait(self.rank, lambda: address in letters)
            _flat(into).copy_(letters.pop(address))

        return Later(receive)


class ThreadMailbox(PackedMailbox):
    """Messages lie in a queue of the receiving rank. `name`: the axis's, unique in its world."""

    # Beside the buffer: reading a header out of GPU memory would make the host wait for the device.
    header_bytes = 0

    def __init__(self, group: RankGroup, world: ThreadWorld, name: object) -> None:
        super().__init__(group, world.device)
        self.world, self.rank = world, group.ranks[group.index]
        self._inbox: deque[Packet] = world.queue((name, self.rank))
        self._outboxes = {side: world.queue((name, rank)) for side, rank in self.neighbours.items()}

    def _post(self, side: Side) -> None:
        """A queue needs no receives; their number limits how many messages may be taken."""

    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None:
        self._outboxes[to].append(Packet(_OPPOSITE[to], header, buffer))
        self.world.wake([self.neighbours[to]])

    def _arrived(self) -> list[Packet]:
        # At most as many as receives are posted: a neighbour may be an epoch ahead, whose messages must wait.
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

    def _flush(self) -> None:
        """Nothing to do: a message is with its receiver as soon as it is sent."""

    def shut(self) -> None:
        return None


class ThreadTransport(Transport):
    """Comms and mailboxes of the rank `rank` of a world."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank = world, rank

    def comm(self, group: RankGroup) -> Comm:
        name = ("comm", group.axis, group.tag, group.ranks)
        return SoloComm(group) if len(group.ranks) == 1 else ThreadComm(group, self.world, name)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        name = ("mailbox", group.axis, group.tag, group.ranks)
        return SoloMailbox(group.axis) if len(group.ranks) == 1 else ThreadMailbox(group, self.world, name)

    def board(self, folder: Path) -> Board:
        return self.world.board

    def aside(self) -> AbstractContextManager[None]:
        return self.world.aside(self.rank)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        self.world.wait(self.rank, ready)
