"""Mailboxes over torch.distributed: gloo between hosts, NCCL between GPUs.

Each link has a process group for each direction, so that no message waits behind one that goes the other way.

gloo never says that a message has come unless somebody waits for it: a thread for each direction of each link does,
and puts what came into the inbox. NCCL's receives occupy the GPU while they wait, so one is posted at a time, on a
stream of its own; an event says when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Queue, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ranks.comm import RankGroup, Work
from meshwright.ranks.mailbox import AHEAD, PackedMailbox, Packet, PolledMailbox, Side, header_of

JOIN_SECONDS = 0.5


@dataclass(frozen=True)
class Channel:
    """The way to a neighbour and back: a process group of the two for each direction, in both of which it is `peer`."""

    peer: int
    outgoing: dist.ProcessGroup
    incoming: dist.ProcessGroup

    def send(self, buffer: Tensor) -> Work:
        work = dist.isend(buffer, group=self.outgoing, group_dst=self.peer)
        assert work is not None, "this rank is not in the group of its own channel"
        return work

    def receive(self, buffer: Tensor) -> Work:
        work = dist.irecv(buffer, group=self.incoming, group_src=self.peer)
        assert work is not None, "this rank is not in the group of its own channel"
        return work


class Waiter:
    """A thread that waits for works in turn. `done` is told of each one's buffer, `failed` of what went wrong."""

    def __init__(self, name: str, done: Callable[[Tensor], None], failed: Callable[[Exception], None]) -> None:
        self.done = done
        self.failed = failed
        self.works: Queue[tuple[Work, Tensor] | None] = Queue()
        self.thread = Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def add(self, work: Work, buffer: Tensor) -> None:
        self.works.put((work, buffer))

    def _run(self) -> None:
        while (entry := self.works.get()) is not None:
            work, buffer = entry
            try:
                work.wait()
                self.done(buffer)
            except Exception as error:
                self.failed(error)
            finally:
                self.works.task_done()
            del entry, work, buffer  # else the last message would live until the next one

    def end(self) -> None:
        """Ends the thread; where its message never comes it stays, a daemon."""
        self.works.put(None)
        self.thread.join(JOIN_SECONDS)


class GlooMailbox(PackedMailbox):
    """On host memory."""

    def __init__(self, group: RankGroup, channels: Mapping[Side, Channel]) -> None:
        super().__init__(group, torch.device("cpu"), AHEAD["cpu"])
        self.channels = channels
        self._inbox: SimpleQueue[Packet | None] = SimpleQueue()  # None: look at the failures
        self._failures: list[tuple[Side, Exception]] = []
        self._receivers = {side: self._waiter(side, "receives", self._into_inbox(side)) for side in channels}
        self._senders = {side: self._waiter(side, "sends", lambda buffer: None) for side in channels}

    def _waiter(self, side: Side, what: str, done: Callable[[Tensor], None]) -> Waiter:
        def failed(error: Exception) -> None:
            self._failures.append((side, error))
            self._inbox.put(None)

        return Waiter(f"{self.axis} {what} {side}", done, failed)

    def _into_inbox(self, side: Side) -> Callable[[Tensor], None]:
        return lambda buffer: self._inbox.put(Packet(side, header_of(buffer), buffer))

    def _post(self, side: Side, buffer: Tensor) -> None:
        self._receivers[side].add(self.channels[side].receive(buffer), buffer)

    def _dispatch(self, to: Side, buffer: Tensor) -> None:
        self._senders[to].add(self.channels[to].send(buffer), buffer)

    def _arrived(self) -> list[Packet]:
        arrivals = []
        while not self._inbox.empty():  # nobody else takes out of it
            arrivals.append(self._checked(self._inbox.get()))
        return arrivals

    def _next_arrivals(self) -> list[Packet]:
        return [self._checked(self._inbox.get())]

    def _checked(self, arrival: Packet | None) -> Packet:
        if arrival is None:
            self._raise_failure()
        assert arrival is not None
        return arrival

    def _raise_failure(self) -> None:
        if self._failures:
            side, error = self._failures[0]
            raise ConnectionError(f"axis {self.axis}: the link to rank {self.neighbours[side]} is broken") from error

    def _flush(self) -> None:
        for sender in self._senders.values():
            sender.works.join()
        self._raise_failure()

    def shut(self) -> None:
        for waiter in (*self._senders.values(), *self._receivers.values()):
            waiter.end()


class NcclMailbox(PolledMailbox):
    """On GPU memory. Not tried yet: two GPUs were never at hand."""

    def __init__(self, group: RankGroup, channels: Mapping[Side, Channel], device: torch.device) -> None:
        super().__init__(group, device, AHEAD["cuda"])
        self.channels = channels
        self._in_streams = {side: torch.cuda.Stream(device) for side in channels}
        self._out_streams = {side: torch.cuda.Stream(device) for side in channels}
        # A communicator is made by its first use, which both ends must reach: here, along the axis, never later.
        for side, channel in channels.items():
            groups = (channel.outgoing, channel.incoming)
            for process_group in groups if side == "after" else reversed(groups):
                dist.all_reduce(torch.zeros(1, device=device), group=process_group)

    def _receive(self, side: Side, buffer: Tensor) -> tuple[torch.cuda.Event, Packet]:
        return self._transfer(self._in_streams[side], side, buffer, self.channels[side].receive)

    def _send(self, to: Side, buffer: Tensor) -> tuple[torch.cuda.Event, Packet]:
        return self._transfer(self._out_streams[to], to, buffer, self.channels[to].send)

    def _transfer(
        self, stream: torch.cuda.Stream, side: Side, buffer: Tensor, begin: Callable[[Tensor], Work]
    ) -> tuple[torch.cuda.Event, Packet]:
        """Begin on a stream of its own. When the event is past, it is done, and the header is on the host."""
        header = torch.empty(2, dtype=torch.int64, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            begin(buffer).wait()  # the stream waits, not the host
            header.copy_(header_of(buffer), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event, Packet(side, header, buffer)

    def _is_done(self, request: torch.cuda.Event) -> bool:
        return request.query()

    def shut(self) -> None:
        return None
