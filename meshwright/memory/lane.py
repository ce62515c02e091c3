"""Lanes: copies that run beside the computation, one after the other, in the order in which they were handed in.

| device | copies from | lane                                                                    |
|--------|-------------|-------------------------------------------------------------------------|
| CPU    | any         | `ThreadLane`: a thread                                                  |
| GPU    | host        | `StreamLane`: a stream of its own; order by events, the host never waits |
| GPU    | disk        | `ThreadLane`, with a stream: a page that is not there blocks the thread |

A copy may read what was computed before it was handed in; who reads what it wrote waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.comm import Work


class Lane(Protocol):
    """Runs copies in order."""

    def submit(self, copy: Callable[[], None]) -> Work: ...


@dataclass(frozen=True)
class Awaited:
    """A thread's work: wait() returns when it is done, and raises what it raised."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result()


@dataclass(frozen=True)
class Recorded:
    """A stream's work: after wait() the current stream runs behind it."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class ThreadLane:
    """One thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = ThreadPoolExecutor(1, "offload-copies")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, copy: Callable[[], None]) -> Work:
        if self._stream is None:
            return Awaited(self._threads.submit(copy))
        computed = torch.cuda.current_stream(self.device).record_event()
        return Awaited(self._threads.submit(self._on_stream, self._stream, computed, copy))

    @staticmethod
    def _on_stream(stream: torch.cuda.Stream, computed: torch.cuda.Event, copy: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            copy()
            stream.synchronize()


class StreamLane:
    """One stream, between host memory that is pinned and the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, copy: Callable[[], None]) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            copy()
        return Recorded(self._stream.record_event())
