"""The launcher's signals: the first Ctrl-C asks the workers to stop softly, the second kills them.

SIGTERM may reach the whole tree of processes at once (Slurm, systemd, docker). Workers and the fork server ignore it,
and mpiexec has it blocked, so that it is a request here as well: only the launcher ends processes, with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from meshwright.launch.stop import STOP_FILE, listens

GRACE_SECONDS = 30.0
"""How long workers may take to finish a step and write a checkpoint, before they are killed."""

ECHO_SECONDS = 0.2
"""A signal that comes again so soon is the same request: `timeout` signals its child, then its child's group."""

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NOTICE = b"\nstopping after this step; once more kills the workers at once\n"


class KillWorkers(BaseException):
    """Raised by a signal handler in the launcher: end the workers now. Not an Exception, lest a library swallows it."""


class StopSignals:
    """While entered, the signals of _ASKING create the file that a worker's StopRequest sees. Main thread only.

    KillWorkers is raised in the main thread by a signal before the job's first step, when there is nothing to save; by
    a second signal; and after GRACE_SECONDS. A signal that was ignored before (nohup) stays ignored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[signal.Signals, signal.Handlers] = {}
        self._received_at = 0.0
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
            if time.monotonic() - self._received_at < ECHO_SECONDS:
                return
            raise KillWorkers
        self.received = signal.Signals(number)
        self._received_at = time.monotonic()
        (self._folder / STOP_FILE).touch()
        if not listens(self._folder):
            raise KillWorkers
        with suppress(OSError):  # nobody reads our stderr any more
            os.write(2, _NOTICE)  # print is not re-entrant
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _grace_is_over(self, number: int, frame: FrameType | None) -> None:
        raise KillWorkers
