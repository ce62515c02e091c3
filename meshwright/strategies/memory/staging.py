"""Staging: the two half-buckets on the device through which the states pass, and the count of its bytes.

Lanes: copies that run beside the computation, one after the other, in the order in which they were handed in.

| device | copies from | lane                                                           |
|--------|-------------|----------------------------------------------------------------|
| CPU    | any         | a thread; or none, and copies are made at once                 |
| GPU    | host        | a stream of its own; order by events, the host never waits     |
| GPU    | disk        | a thread, with a stream: a page that is not there blocks it    |

A copy may read what was computed before it was handed in; who reads what it wrote waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meshwright.ranks.comm import DONE, Later, Work


class Lane:
    """A lane of one thread, of one stream on a GPU, or of both: then the thread waits for the stream. With neither,
    copies are made at once."""

    def __init__(self, device: torch.device, *, threaded: bool) -> None:
        self.device = device
        # One thread: copies keep the order in which they were handed in, on which a half's reuse rests.
        self._threads = ThreadPoolExecutor(1, "offload-copies") if threaded else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, copy: Callable[[], None]) -> Work:
        if (stream := self._stream) is None:
            if self._threads is None:
                copy()
                return DONE
            return Later(self._threads.submit(copy).result)  # which raises what the copy raised
        # Recorded by the caller: in the thread the current stream is another one, and the copy could read too early.
        computed = torch.cuda.current_stream(self.device).record_event()

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                copy()
                if self._threads is not None:
                    stream.synchronize()  # the thread's work is done when the copy is, not when it is enqueued

        if self._threads is not None:
            return Later(self._threads.submit(on_stream).result)
        on_stream()
        event = stream.record_event()
        return Later(lambda: torch.cuda.current_stream().wait_event(event))  # which then runs behind the copy


GRADIENT = "gradient"


class Staging:
    """Two halves, each with room for `length` elements of every state and of the float32 gradient.

    AdamW: 4 (weight) + 8 (two moments) + 4 (gradient) = 16 bytes an element, in two halves: 16 · bucket.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], length: int, device: torch.device) -> None:
        self.length = length
        self._halves = tuple(
            {kind: torch.empty(length, dtype=dtype, device=device) for kind, dtype in dtypes.items()} for _ in range(2)
        )
        self.num_bytes = 2 * sum(dtype.itemsize for dtype in dtypes.values()) * length
        """All of the optimizer's memory on the device, also where the device is a CPU."""

    def room(self, number: int, kind: str, num_elements: int) -> Tensor:
        """The room of one kind for piece `number` of the walk: every second piece shares a half."""
        # Pieces go through in order, so a half is free again when the piece before the last has been written back.
        return self._halves[number % 2][kind][:num_elements]
