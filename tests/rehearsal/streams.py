"""CUDA's streams on a host: threads wait for a stream's transfers, and an event is past when these threads have ended.

With these streams, the mailbox between GPUs makes the same calls as on GPUs, over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.ranks.comm import RankGroup, Work
from meshwright.ranks.mailbox import Mailbox
from meshwright.ranks.mailbox_torch import Channel, DeviceMailbox, NcclLinks
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.torch_comm import TorchTransport
from tests.rehearsal.births import HostChannel


@dataclass(frozen=True)
class Event:
    """The end of a stream's work at the record of the event."""

    threads: tuple[Thread, ...]

    def query(self) -> bool:
        return not any(thread.is_alive() for thread in self.threads)


@dataclass(eq=False)
class Stream:
    """The work of a stream that is not done."""

    threads: list[Thread] = field(default_factory=list)
    priority: int = 0

    def record_event(self) -> Event:
        return Event(tuple(self.threads))


class Streams:
    """The streams of a process, and the current stream."""

    def __init__(self) -> None:
        self.current = Stream()

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@dataclass(frozen=True)
class StreamWork:
    """A transfer that the current stream waits for; the host does not."""

    work: Work
    streams: Streams

    def wait(self) -> None:
        assert self.streams.current.priority < 0, "a message waits until the device has room for it"
        thread = Thread(target=self.work.wait, daemon=True)
        thread.start()
        self.streams.current.threads.append(thread)


@dataclass(frozen=True)
class StreamChannel(Channel):
    """A way with batches in streams."""

    streams: Streams

    def send(self, buffer: Tensor, *, batched: bool = False) -> Work:
        return StreamWork(super().send(buffer, batched=batched), self.streams)

    def receive(self, buffer: Tensor, *, batched: bool = False) -> Work:
        return StreamWork(super().receive(buffer, batched=batched), self.streams)


@dataclass(frozen=True)
class Streamed(TorchTransport):
    """The transport of GPUs, on a host."""

    streams: Streams = field(default_factory=Streams)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        ways = self._channels(group)
        on_host = {side: HostChannel(way.peer, way.outgoing, way.incoming) for side, way in ways.items()}
        channels = {
            side: StreamChannel(way.peer, way.outgoing, way.incoming, self.streams) for side, way in ways.items()
        }
        return DeviceMailbox(group, on_host, device, NcclLinks(channels, device))


@contextmanager
def on_streams(mesh: Mesh) -> Iterator[Mesh]:
    """Yield the mesh with the mailbox between GPUs."""
    streams, transport = Streams(), mesh.transport
    assert isinstance(transport, TorchTransport)
    stubs: dict[str, Any] = {
        "Stream": lambda device, priority: Stream(priority=priority),
        "stream": streams.enter,
        "current_stream": lambda device: streams.current,
    }
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(patch.object(torch.cuda, name, stub))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda x, stream: None))
        streamed = Streamed(transport.timeout, mesh.device, births=False, peers=transport.peers, streams=streams)
        yield replace(mesh, transport=streamed, _comms={}, _mailboxes={})
