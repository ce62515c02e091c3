"""Mailbox: messages between neighbouring ranks of an axis, taken in the order of arrival.

Receives are posted ahead and sends return at once, so that messages are transferred while the rank computes. The rank
polls for arrivals between tasks, and sleeps in `wait` when no task is left (AxoNN, arXiv 2110.13005).

A message's subject is a place at which the model's chain is cut. Activations and gradients across one cut have equal
shapes and dtypes. All messages to and from a side have the size of the largest, so receives are posted without a
handshake. Between hosts a message is one transfer, since packing costs less than a second message:

| bytes | holds |
|---|---|
| 0 to 8 | the epoch, int64 |
| 8 to 16 | the index of the microbatch, and the subject in the upper half, int64 |
| from 16 | the tensors, each at the next multiple of 16 |

Between GPUs the header is sent from host to host, before the tensors (mailbox_torch.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.ranks.comm import NAP_SECONDS, RankGroup, size_bytes
from meshwright.ranks.flight_recorder import Call
from meshwright.ranks.ledger import MESSAGE

Side = Literal["before", "after"]
"""A neighbour on the axis: index - 1 or index + 1. On an axis that is no ring, the first rank has no neighbour before
and the last none after. Two ranks never form a ring: each has one neighbour."""

SIDES: tuple[Side, Side] = ("before", "after")
FURTHER: dict[Side, int] = {"before": -1, "after": 1}
"""A neighbour's distance on the axis; in a ring the first and the last rank are neighbours too."""

HEADER_BYTES = 16
SUBJECT_BITS = 32
ALIGNMENT_BYTES = 16
AHEAD = {"cpu": 4, "cuda": 1}
"""Number of messages per side with memory allocated before their tensors arrive, by device type: on a host the posted
receives, on a GPU the message announced by a header."""


@dataclass(frozen=True)
class Message:
    """Tensors received from `side` for the microbatch `index`."""

    side: Side
    index: int
    tensors: tuple[Tensor, ...]
    subject: int = 0


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class CutForms(NamedTuple):
    """The tensors of a subject's messages. `inward`: activations are received and gradients sent; else the reverse."""

    tensors: tuple[TensorMeta, ...]
    inward: bool


MessageMeta = Mapping[Side, Mapping[int, CutForms]]
"""By side and subject, the forms of messages to and from that side; empty without a neighbour."""


def both_sides(*tensors: TensorMeta) -> MessageMeta:
    """Describe messages with one subject: activations from the rank before, gradients from the rank after."""
    return {side: {0: CutForms(tensors, side == "before")} for side in SIDES}


class Mailbox:
    """Messages between this rank and the neighbours on one axis. This class serves an axis of one rank, without
    neighbours. PackedMailbox is the base of mailboxes over a transport."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def open(self, epoch: int, meta: MessageMeta, before: int, after: int) -> None:
        """Begin an epoch (a step or an evaluation). Late messages of older epochs are dropped.

        Args:
            epoch: a number that grows with each call, equal on neighbours.
            meta: forms of the messages. A side's message size may change only if no old receive is posted there.
            before: number of messages expected from the rank before.
            after: number of messages expected from the rank after.
        """
        assert before == after == 0, f"axis {self.axis} has one rank: {before} and {after} messages from nobody"

    def send(self, to: Side, index: int, tensors: Sequence[Tensor], subject: int = 0) -> None:
        """Send tensors of the form in `meta` for the side and subject. Returns at once: the tensors are copied, and may
        be changed."""
        raise AssertionError(f"axis {self.axis} has one rank: nobody is {to}")

    def poll(self) -> list[Message]:
        """Return the messages that arrived since the last call, without waiting. The caller owns the tensors."""
        return []

    def wait(self) -> list[Message]:
        """Sleep until a message arrives; return all that arrived. Raises ConnectionError when a neighbour is gone."""
        raise AssertionError(f"axis {self.axis} has one rank: nobody to wait for")

    def flush(self) -> None:
        """Return after all sends are complete. Called after all expected messages have been taken."""

    def shut(self) -> None:
        """End threads and communicators, without waiting for any rank."""


def neighbours_of(group: RankGroup) -> dict[Side, int]:
    """Return the indices of a rank's neighbours in the group."""
    count = len(group.ranks)
    places = {side: group.index + step for side, step in FURTHER.items()}
    if group.ring and count > 2:
        # Two ranks would be neighbours on both sides, and a header does not name the side of a message.
        return {side: at % count for side, at in places.items()}
    return {side: at for side, at in places.items() if 0 <= at < count}


@dataclass(frozen=True)
class Packing:
    """Byte offsets of a message's tensors, after a header of `header_bytes`."""

    tensors: tuple[TensorMeta, ...] = ()
    header_bytes: int = HEADER_BYTES

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor, then the message's size, in bytes."""
        offsets = [self.header_bytes]
        for meta in self.tensors:
            # A view of bytes as a wider type must begin at a multiple of the type's size; 16 serves every type.
            offsets.append(-(-(offsets[-1] + meta.size_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        return tuple(offsets)

    @property
    def size_bytes(self) -> int:
        return self.offsets[-1]

    def pack(self, buffer: Tensor, header: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the tensors, and the header if `header_bytes`, into the buffer (uint8, at least size_bytes)."""
        given = tuple(TensorMeta(tuple(x.shape), x.dtype) for x in tensors)
        assert given == self.tensors, f"sent {given} in an epoch of {self.tensors}"
        if self.header_bytes:
            header_of(buffer).copy_(header)
        for view, x in zip(self.unpack(buffer), tensors, strict=True):
            view.copy_(x.detach())

    def unpack(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as views of the buffer."""
        return tuple(
            buffer[offset : offset + meta.size_bytes].view(meta.dtype).view(meta.shape)
            for meta, offset in zip(self.tensors, self.offsets, strict=False)
        )


def header_of(buffer: Tensor) -> Tensor:
    """View a packed message's header, int64 [2]: the epoch, and the index with the subject."""
    return buffer[:HEADER_BYTES].view(torch.int64)


@dataclass(frozen=True)
class Packet:
    """A received buffer, and the message's header on the host, int64 [2]."""

    side: Side
    header: Tensor
    buffer: Tensor


class PackedMailbox(Mailbox, ABC):
    """The part common to all transports: packing, epochs, posted receives, and the ledger."""

    header_bytes = HEADER_BYTES
    """The header's size in front of the tensors; 0 where headers travel separately."""

    def __init__(self, group: RankGroup, device: torch.device, ahead: int = AHEAD["cpu"]) -> None:
        super().__init__(group.axis)
        self.ledger, self.recorder = group.ledger, group.recorder
        self.places = neighbours_of(group)
        self.neighbours = {side: group.ranks[at] for side, at in self.places.items()}
        """The neighbours' ranks in the world."""
        self.device = device
        self.ahead = ahead
        self._epoch = -1
        self._packings: dict[Side, dict[int, Packing]] = {side: {} for side in SIDES}
        self._sizes: dict[Side, int] = dict.fromkeys(SIDES, Packing().size_bytes)
        """Bytes of every message to and from the side."""
        self._index = group.index
        self._missing: dict[Side, int] = dict.fromkeys(SIDES, 0)
        self._posted: dict[Side, int] = dict.fromkeys(SIDES, 0)

    def open(self, epoch: int, meta: MessageMeta, before: int, after: int) -> None:
        assert epoch > self._epoch, f"epoch {epoch} after {self._epoch}: they only grow"
        sizes = {}
        for side in SIDES:
            packings = {subject: Packing(forms.tensors, self.header_bytes) for subject, forms in meta[side].items()}
            sizes[side] = max((packing.size_bytes for packing in packings.values()), default=self.header_bytes)
            # A posted receive's buffer has the old size, too small for a larger message.
            assert sizes[side] == self._sizes[side] or not self._posted[side], (
                f"epoch {epoch} has other forms, and epoch {self._epoch} left receives posted: {self._posted}"
            )
            self._packings[side] = packings
        self._epoch, self._sizes = epoch, sizes
        self._missing = {"before": before, "after": after}
        for side, count in self._missing.items():
            assert not count or side in self.neighbours, (
                f"axis {self.axis}: no neighbour {side}, {count} messages from it"
            )
        self._post_receives()

    def send(self, to: Side, index: int, tensors: Sequence[Tensor], subject: int = 0) -> None:
        assert to in self.neighbours, f"axis {self.axis}: no neighbour {to}"
        header, buffer = torch.tensor([self._epoch, index + (subject << SUBJECT_BITS)]), self.new_buffer(to)
        self._packings[to][subject].pack(buffer, header, tensors)
        self.ledger.record(self.axis, MESSAGE, sum(size_bytes(x) for x in tensors), self.places[to] - self._index)
        self._dispatch(to, header, buffer)

    def poll(self) -> list[Message]:
        return self._take(self._arrived())

    def wait(self) -> list[Message]:
        assert any(self._missing.values()), f"axis {self.axis}: epoch {self._epoch} has no message to wait for"
        messages = self.poll()
        if not messages:
            senders = [side for side, count in self._missing.items() if count]
            with self.recorder.waiting(self._call("receive", senders)):
                while not messages:
                    messages = self._take(self._next_arrivals())
        return messages

    def _call(self, verb: str, sides: Sequence[Side]) -> Call:
        """Describe a wait for messages from these sides, or for the receipt of this rank's messages there."""
        size = max((self._sizes[side] for side in sides), default=0)
        return Call(self.axis, verb, size, tuple(self.neighbours[side] for side in sides))

    def _take(self, arrivals: list[Packet]) -> list[Message]:
        """Return the messages among arrivals that belong to the current epoch, and post new receives."""
        messages = []
        for arrival in arrivals:
            epoch, label = arrival.header.tolist()
            subject, index = label >> SUBJECT_BITS, label % (1 << SUBJECT_BITS)
            # Sizes may change between epochs: a later epoch's message would be read with the wrong shapes.
            assert epoch <= self._epoch, f"axis {self.axis}: {arrival.side} is in epoch {epoch}, we in {self._epoch}"
            # A message of an older epoch only uses up a receive.
            self._posted[arrival.side] -= 1
            if epoch == self._epoch:
                self._missing[arrival.side] -= 1
                tensors = self._packings[arrival.side][subject].unpack(arrival.buffer)
                messages.append(Message(arrival.side, index, tensors, subject))
        self._post_receives()
        return messages

    def _post_receives(self) -> None:
        for side in self.neighbours:
            # No more receives than expected messages: an unanswered receive would stay posted after the epoch.
            while self._posted[side] < min(self.ahead, self._missing[side]):
                self._post(side)
                self._posted[side] += 1

    def new_buffer(self, side: Side) -> Tensor:
        """Allocate the memory of a message to or from the side."""
        return torch.empty(self._sizes[side], dtype=torch.uint8, device=self.device)

    def _post(self, side: Side) -> None:
        """Post a receive for the side's next message, if the transport needs posted receives. A side's messages arrive
        in the order sent."""

    @abstractmethod
    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None:
        """Begin to send the buffer, and keep the buffer's memory until the send is complete."""

    @abstractmethod
    def _arrived(self) -> list[Packet]:
        """Return finished receives, oldest first, without waiting."""

    def _next_arrivals(self) -> list[Packet]:
        """Sleep in naps until a receive has finished; return all finished ones.

        MPI's own wait would spin on a core that another rank needs.
        """
        arrivals = self._arrived()
        while not arrivals:
            time.sleep(NAP_SECONDS)
            arrivals = self._arrived()
        return arrivals

    def flush(self) -> None:
        with self.recorder.waiting(self._call("send", list(self.neighbours))):
            self._flush()

    def _flush(self) -> None:
        """Return after all sends are complete. The caller records the wait."""
