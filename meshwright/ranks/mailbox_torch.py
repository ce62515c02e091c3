"""Mailboxes over torch.distributed: gloo between hosts, NCCL between GPUs.

Each link has one process group per direction, so that no message waits for one of the other direction.

gloo reports a message only to a waiting call: one thread per link and direction waits, and fills the inbox.

An NCCL receive that is enqueued before the message exists spins on the GPU. Several such receives can deadlock, if
their streams share a hardware queue with the awaited kernels. So a header from host to host announces each message:

    sender      packs on the device ── after the packing: enqueues the send, and sends the header to the other host
    receiver    has the header ── enqueues the receive ── after the receive: the message has arrived

Both ends enqueue a link's transfers in the order of the sender's headers, so no transfer waits long for the other end.
The order of arrival means the same as between hosts: a header is sent after the tensors exist.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import Event

from meshwright.ranks.comm import NAP_SECONDS, RankGroup, Work
from meshwright.ranks.mailbox import PackedMailbox, Packet, Side, header_of

JOIN_SECONDS = 0.5


@dataclass(frozen=True)
class Channel:
    """A link to a neighbour: two process groups of the two ranks, one per direction. `peer`: the neighbour's index."""

    peer: int
    outgoing: dist.ProcessGroup
    incoming: dist.ProcessGroup

    def send(self, buffer: Tensor, *, batched: bool = False) -> Work:
        """Begin to send. `batched`: as a batch of one, over the group's communicator; isend would make another one."""
        if batched:
            batch = [dist.P2POp(dist.isend, buffer, group=self.outgoing, group_peer=self.peer)]
            return dist.batch_isend_irecv(batch)[0]
        work = dist.isend(buffer, group=self.outgoing, group_dst=self.peer)
        assert work is not None, "this rank is not in the group of its own channel"
        return work

    def receive(self, buffer: Tensor, *, batched: bool = False) -> Work:
        """Begin to receive. `batched`: as a batch of one, if the neighbour sends a batch."""
        if batched:
            batch = [dist.P2POp(dist.irecv, buffer, group=self.incoming, group_peer=self.peer)]
            return dist.batch_isend_irecv(batch)[0]
        work = dist.irecv(buffer, group=self.incoming, group_src=self.peer)
        assert work is not None, "this rank is not in the group of its own channel"
        return work


class Waiter:
    """A thread that waits for `works` in turn. Calls `done` with each work's buffer, or `failed` with the exception.
    None among the works ends the thread."""

    def __init__(self, name: str, done: Callable[[Tensor], None], failed: Callable[[Exception], None]) -> None:
        self.done = done
        self.failed = failed
        self.works: Queue[tuple[Work, Tensor] | None] = Queue()
        self.thread = Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (entry := self.works.get()) is not None:
            work, buffer = entry
            try:
                work.wait()
                self.done(buffer)
            # All exceptions: Python only prints one raised in a thread, and the rank would wait for ever.
            except Exception as error:
                self.failed(error)
            finally:
                self.works.task_done()
            del entry, work, buffer  # else the last message's memory is kept until the next message


class GlooMailbox(PackedMailbox):
    """Messages in host memory, over gloo."""

    def __init__(
        self, group: RankGroup, channels: Mapping[Side, Channel], device: torch.device = torch.device("cpu")
    ) -> None:
        super().__init__(group, device)
        self.channels = channels
        self._inbox: SimpleQueue[Packet | None] = SimpleQueue()  # None: look at the failures
        self._failures: list[tuple[Side, Exception]] = []
        # Two threads a side: a send waiting for a slow neighbour must not delay messages from it.
        self._receivers = {
            side: self._waiter(side, "receives", lambda buffer, side=side: self._inbox.put(  # type: ignore[misc]
                Packet(side, header_of(buffer), buffer)
            ))
            for side in channels
        }  # fmt: skip
        self._senders = {side: self._waiter(side, "sends", lambda buffer: None) for side in channels}

    def _waiter(self, side: Side, what: str, done: Callable[[Tensor], None]) -> Waiter:
        def failed(error: Exception) -> None:
            self._failures.append((side, error))
            self._inbox.put(None)

        return Waiter(f"{self.axis} {what} {side}", done, failed)

    def _post(self, side: Side) -> None:
        # Between devices only the header is sent from host to host.
        buffer = self.new_buffer(side) if self.header_bytes else torch.empty(2, dtype=torch.int64)
        self._receivers[side].works.put((self.channels[side].receive(buffer), buffer))

    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None:
        self._senders[to].works.put((self.channels[to].send(buffer), buffer))

    def _arrived(self) -> list[Packet]:
        arrivals = []
        while not self._inbox.empty():  # only this thread takes packets
            arrivals.append(self._checked(self._inbox.get()))
        return arrivals

    def _next_arrivals(self) -> list[Packet]:
        return [self._checked(self._inbox.get())]

    def _checked(self, arrival: Packet | None) -> Packet:
        if arrival is None:
            side, error = self._failures[0]
            raise ConnectionError(f"axis {self.axis}: the link to rank {self.neighbours[side]} is broken") from error
        return arrival

    def _flush(self) -> None:
        for sender in self._senders.values():
            # queue.join counts task_done calls, which failed works make too.
            sender.works.join()
        if self._failures:
            self._checked(None)

    def shut(self) -> None:
        waiters = (*self._senders.values(), *self._receivers.values())
        for waiter in waiters:
            waiter.works.put(None)
        for waiter in waiters:
            # With a limit: a thread that waits for a failed neighbour's message never ends, and remains as a daemon.
            waiter.thread.join(JOIN_SECONDS)


class NcclLinks:
    """NCCL's sends and receives, with one stream and one communicator per link and direction.

    Each call returns at once, with an event for the end of the transfer. Transfers are batches of one: a plain isend
    would need another communicator, created at the first use.
    """

    def __init__(self, channels: Mapping[Side, Channel], device: torch.device) -> None:
        self.channels = channels
        self.device = device
        # High priority, as NCCL's own streams (`carry_messages_first`).
        self._in_streams = {side: torch.cuda.Stream(device, priority=-1) for side in channels}
        self._out_streams = {side: torch.cuda.Stream(device, priority=-1) for side in channels}

    def mark(self) -> Event:
        """Record an event after all work enqueued so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, to: Side, buffer: Tensor) -> Event:
        with torch.cuda.stream(self._out_streams[to]):
            self.channels[to].send(buffer, batched=True).wait()  # the stream waits, not the host
            return self.mark()

    def receive(self, side: Side, new_buffer: Callable[[], Tensor]) -> tuple[Event, Tensor]:
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._in_streams[side]):
            buffer = new_buffer()  # from this stream's memory: kernels may use the compute stream's
            # Without this, the next message could overwrite freed memory that the compute stream still reads.
            buffer.record_stream(compute)
            self.channels[side].receive(buffer, batched=True).wait()
            return self.mark(), buffer


class DeviceMailbox(GlooMailbox):
    """A mailbox that sends headers from host to host, and tensors from device to device."""

    header_bytes = 0

    def __init__(
        self, group: RankGroup, channels: Mapping[Side, Channel], device: torch.device, links: NcclLinks
    ) -> None:
        super().__init__(group, channels, device)
        self.links = links
        self._packed: dict[Side, deque[tuple[Event, Tensor, Tensor]]] = {side: deque() for side in channels}
        self._leaving: dict[Side, deque[tuple[Event, Tensor]]] = {side: deque() for side in channels}
        self._coming: dict[Side, deque[tuple[Event, Packet]]] = {side: deque() for side in channels}

    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None:
        # Not sent yet: the header announces existing tensors, so the header waits until the device has packed them.
        self._packed[to].append((self.links.mark(), header, buffer))
        self._move()

    def _move(self) -> None:
        """Begin sends of packed tensors and receives of announced tensors, and release finished sends."""
        for side, packed in self._packed.items():
            while packed and packed[0][0].query():
                _, header, buffer = packed.popleft()
                # Enqueue the send before sending its header, in the order in which the receiver enqueues receives.
                self._leaving[side].append((self.links.send(side, buffer), buffer))
                super()._dispatch(side, header, header)
            _take_past(self._leaving[side])
        for packet in super()._arrived():
            event, buffer = self.links.receive(packet.side, partial(self.new_buffer, packet.side))
            self._coming[packet.side].append((event, Packet(packet.side, packet.header, buffer)))

    def _arrived(self) -> list[Packet]:
        self._move()
        return [packet for coming in self._coming.values() for packet in _take_past(coming)]

    def _next_arrivals(self) -> list[Packet]:
        return PackedMailbox._next_arrivals(self)  # this loop also sends packed messages

    def _flush(self) -> None:
        while any(self._packed.values()) or any(self._leaving.values()):
            time.sleep(NAP_SECONDS)
            self._move()
        super()._flush()


def _take_past(transfers: deque[tuple[Event, Any]]) -> list[Any]:
    """Remove and return the finished transfers, which finish in the order of their start."""
    past = []
    while transfers and transfers[0][0].query():
        past.append(transfers.popleft()[1])
    return past
