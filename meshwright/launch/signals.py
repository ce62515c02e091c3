"""The launcher's signals: the first Ctrl-C asks the workers to stop softly, the second kills them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

GRACE_SECONDS = 30.0
"""How long workers may take to finish a step and write a checkpoint, before they are killed."""

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICE = b"\nstopping after this step; once more kills the workers at once\n"


class KillWorkers(BaseException):
    """Raised by a signal handler in the launcher: end the workers now. Not an Exception, lest a library swallows it."""


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP create `marker`, which the workers' StopRequest sees. Main thread only.

    A second signal, or GRACE_SECONDS without the job's end, raises KillWorkers in the main thread. A signal that was
    ignored before (nohup) stays ignored.
    """

    def __init__(self, marker: Path) -> None:
        self._marker = marker
        self._before: dict[signal.Signals, signal.Handlers] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        for number in _ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)  # type: ignore[assignment]
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._grace_is_over)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KillWorkers
        self.received = signal.Signals(number)
        self._marker.touch()
        os.write(2, _NOTICE)  # print is not re-entrant
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _grace_is_over(self, number: int, frame: FrameType | None) -> None:
        raise KillWorkers
