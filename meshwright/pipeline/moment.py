"""When something was on a rank's device. A host knows at once; a GPU lags behind the host that gives it work.

So a moment on a GPU is an event in its stream, and is asked for its time later: nothing waits for the device in order
to be measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Moment = Callable[[], float]
"""When it was, in seconds since the epoch. On a GPU: waits until the device has passed it."""


class Watch:
    """Takes moments of a device. `start` comes first, when the device has nothing left to do: after a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Moments count from here. The calendar is asked once, so that a clock that jumps moves no moment of a step."""
        self._started, self._from = time.time(), time.perf_counter()
        if self.device.type == "cuda":
            self._start = self._event()

    def now(self) -> Moment:
        """This moment: when the device has done what it was given so far."""
        if self.device.type == "cuda":
            started, start, event = self._started, self._start, self._event()

            def ask() -> float:
                event.synchronize()
                return float(started + start.elapsed_time(event) / 1e3)

            return ask
        seconds = self._started + time.perf_counter() - self._from
        return lambda: seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
