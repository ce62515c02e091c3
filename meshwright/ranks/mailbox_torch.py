"""Mailboxes over torch.distributed: gloo between hosts, NCCL between GPUs.

Each link has a process group for each direction, so that no message waits behind one that goes the other way.

gloo never says that a message has come unless somebody waits for it: a thread for each direction of each link does,
and puts what came into the inbox. NCCL's receives occupy the GPU while they wait, so one is posted at a time, on a
stream of its own; an event says when it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Queue, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ranks.comm import Work
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import AHEAD, HEADER_BYTES, PackedMailbox, Packet, Side

JOIN_SECONDS = 0.5


@dataclass(frozen=True)
class Channel:
    """The way to a neighbour and back: a process group of the two for each direction, the neighbour's rank in both."""

    rank: int
    peer: int
    outgoing: dist.ProcessGroup
    incoming: dist.ProcessGroup

    def send(self, buffer: Tensor) -> Work:
        work = dist.isend(buffer, group=self.outgoing, group_dst=self.peer)
        assert work is not None, f"not in the group with rank {self.rank}"
        return work

    def receive(self, buffer: Tensor) -> Work:
        work = dist.irecv(buffer, group=self.incoming, group_src=self.peer)
        assert work is not None, f"not in the group with rank {self.rank}"
        return work


def neighbours_of(links: Mapping[Side, Channel]) -> dict[Side, int]:
    """Which rank of the world each link leads to."""
    return {side: link.rank for side, link in links.items()}


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

    def __init__(
        self,
        axis: str,
        links: Mapping[Side, Channel],
        ledger: Ledger,
        recorder: FlightRecorder,
        ahead: int = AHEAD["cpu"],
    ) -> None:
        super().__init__(axis, neighbours_of(links), ledger, recorder, torch.device("cpu"), ahead)
        self.links = links
        self._inbox: SimpleQueue[Packet | None] = SimpleQueue()  # None: look at the failures
        self._failures: list[tuple[Side, Exception]] = []
        self._receivers = {side: self._waiter(side, "receives", self._into_inbox(side)) for side in links}
        self._senders = {side: self._waiter(side, "sends", lambda buffer: None) for side in links}

    def _waiter(self, side: Side, what: str, done: Callable[[Tensor], None]) -> Waiter:
        def failed(error: Exception) -> None:
            self._failures.append((side, error))
            self._inbox.put(None)

        return Waiter(f"{self.axis} {what} {side}", done, failed)

    def _into_inbox(self, side: Side) -> Callable[[Tensor], None]:
        return lambda buffer: self._inbox.put(Packet.on_host(side, buffer))

    def _post(self, side: Side, buffer: Tensor) -> None:
        self._receivers[side].add(self.links[side].receive(buffer), buffer)

    def _dispatch(self, to: Side, buffer: Tensor) -> None:
        self._senders[to].add(self.links[to].send(buffer), buffer)

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
            raise ConnectionError(f"axis {self.axis}: the link to rank {self.links[side].rank} is broken") from error

    def _flush(self) -> None:
        for sender in self._senders.values():
            sender.works.join()
        self._raise_failure()

    def shut(self) -> None:
        for waiter in (*self._senders.values(), *self._receivers.values()):
            waiter.end()


@dataclass(frozen=True)
class Underway:
    """A transfer on a stream of its own: `event` is past when it is done; a receive's header is then on the host."""

    event: torch.cuda.Event
    buffer: Tensor
    header: Tensor


class NcclMailbox(PackedMailbox):
    """On GPU memory. Not tried yet: two GPUs were never at hand."""

    def __init__(
        self, axis: str, links: Mapping[Side, Channel], ledger: Ledger, recorder: FlightRecorder, device: torch.device
    ) -> None:
        super().__init__(axis, neighbours_of(links), ledger, recorder, device, AHEAD["cuda"])
        self.links = links
        self._receives: dict[Side, deque[Underway]] = {side: deque() for side in links}
        self._sends: dict[Side, deque[Underway]] = {side: deque() for side in links}
        self._in_streams = {side: torch.cuda.Stream(device) for side in links}
        self._out_streams = {side: torch.cuda.Stream(device) for side in links}
        self._connect()

    def _connect(self) -> None:
        """A communicator is made by its first use, which both ends must reach: here, along the axis, never later."""
        for side, link in self.links.items():
            forward, backward = (link.outgoing, link.incoming) if side == "after" else (link.incoming, link.outgoing)
            for group in (forward, backward):
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def _transfer(self, stream: torch.cuda.Stream, buffer: Tensor, begin: Callable[[Tensor], Work]) -> Underway:
        header = torch.empty(2, dtype=torch.int64, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            begin(buffer).wait()  # the stream waits, not the host
            header.copy_(buffer[:HEADER_BYTES].view(torch.int64), non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return Underway(event, buffer, header)

    def _post(self, side: Side, buffer: Tensor) -> None:
        self._receives[side].append(self._transfer(self._in_streams[side], buffer, self.links[side].receive))

    def _dispatch(self, to: Side, buffer: Tensor) -> None:
        self._drop_sent()
        self._sends[to].append(self._transfer(self._out_streams[to], buffer, self.links[to].send))

    def _drop_sent(self) -> None:
        for sends in self._sends.values():
            while sends and sends[0].event.query():
                sends.popleft()

    def _arrived(self) -> list[Packet]:
        self._drop_sent()
        arrivals = []
        for side, receives in self._receives.items():
            while receives and receives[0].event.query():
                done = receives.popleft()
                arrivals.append(Packet(side, done.header, done.buffer))
        return arrivals

    def _flush(self) -> None:
        for sends in self._sends.values():
            while sends:
                sends.popleft().event.synchronize()

    def shut(self) -> None:
        return None
