"""Staging: two half-buckets on the device for offloaded states, with a count of their bytes; lanes: overlapped copies.

A lane makes copies next to the computation, one after another, in the order of `submit`:

| device | copies from | lane                                                           |
|--------|-------------|----------------------------------------------------------------|
| CPU    | any         | a thread; or none, and copies are made at once                 |
| GPU    | host        | a separate stream; order by events, the host never waits       |
| GPU    | disk        | a thread, with a stream: a page that is not in memory blocks   |

A copy may read tensors computed before `submit`; readers of the copy wait for its `Work`.
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
        # One thread: copies keep the order of `submit`, which the reuse of a half requires.
        self._threads = ThreadPoolExecutor(1, "offload-copies") if threaded else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, copy: Callable[[], None]) -> Work:
        if (stream := self._stream) is None:
            if self._threads is None:
                copy()
                return DONE
            return Later(self._threads.submit(copy).result)  # raises the copy's error
        # Recorded by the caller: the thread has another current stream, and the copy could read too early.
        computed = torch.cuda.current_stream(self.device).record_event()

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                copy()
                if self._threads is not None:
                    stream.synchronize()  # the thread's work ends when the copy has ended, not when enqueued

        if self._threads is not None:
            return Later(self._threads.submit(on_stream).result)
        on_stream()
        event = stream.record_event()
        return Later(lambda: torch.cuda.current_stream().wait_event(event))  # orders the current stream after the copy


GRADIENT = "gradient"


class Staging:
    """Two halves, each with room for `length` elements of every state and of the float32 gradient.

    AdamW: 4 (weight) + 8 (two moments) + 4 (gradient) = 16 bytes an element, in two halves: 16 · bucket.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], length: int, device: torch.device) -> None:
        self.length = length
        self._halves = tuple(
            {state_name: torch.empty(length, dtype=dtype, device=device) for state_name, dtype in dtypes.items()}
            for _ in range(2)
        )
        self.num_bytes = 2 * sum(dtype.itemsize for dtype in dtypes.values()) * length
        """All of the optimizer's memory on the device, also if the device is a CPU."""

    def room(self, piece_index: int, state_name: str, num_elements: int) -> Tensor:
        """Return the room of one state for piece `piece_index`: every second piece uses the same half."""
        # Pieces are in order: a half is free again when the piece before the last has been written back.
        return self._halves[piece_index % 2][state_name][:num_elements]
