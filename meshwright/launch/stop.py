"""The request to stop softly, as a worker sees it: finish the step, write a checkpoint, return.

Under our own launcher the request is a file in the launch folder. Unlike a signal it cannot be lost, cannot kill a
worker that is still importing, and takes the same road through mpiexec and torch. Inside somebody else's launcher
(torchrun, srun, mpirun) the request is SIGTERM, SIGINT or SIGUSR1, which those forward.

A worker listens from its first question on, that is from its first step. Before, there is nothing to save and it may
wait for ranks that never come: a signal then ends it at once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOP_FILE = "stop"
LISTENING_FILE = "listening"
JOINED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

STOPPED_EXIT_CODE = os.EX_TEMPFAIL
"""Of a run that was asked to stop, finished its step and saved: 75, so that a batch script knows to queue it again."""

ECHO_SECONDS = 1.0
"""A signal that comes again so soon is the same request: torchrun and srun forward what their workers got already."""


class StopRequest:
    """Passed to the entry function. Ranks may see the request at different steps: agree on it before acting on it.

    This one is never asked from outside.
    """

    def __init__(self) -> None:
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether somebody asked; once true, it stays true. Costs a few microseconds: ask once a step."""
        return self._requested

    def request(self) -> None:
        """Ask this process to stop."""
        self._requested = True


class FileStop(StopRequest):
    """Asked by a file in the launch folder. The first question leaves a file there: this attempt of the job listens."""

    def __init__(self, folder: Path, attempt: int) -> None:
        super().__init__()
        self._marker = folder / STOP_FILE
        self._listening = attempt_folder(folder, attempt) / LISTENING_FILE
        self._listens = False

    @property
    def requested(self) -> bool:
        if not self._listens:
            self._listening.parent.mkdir(exist_ok=True)
            self._listening.touch()
            self._listens = True
        if not self._requested and self._marker.exists():
            self.request()
        return self._requested


class SignalStop(StopRequest):
    """Asked by the signals of JOINED_SIGNALS, from its first question on. Main thread only.

    A second signal ends the process at once, as the first does before the first question.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listens = False
        self._asked_at = 0.0
        for number in JOINED_SIGNALS:  # Python's own KeyboardInterrupt waits for calls into libraries to return
            signal.signal(number, signal.SIG_DFL)

    @property
    def requested(self) -> bool:
        if not self._listens:
            for number in JOINED_SIGNALS:
                signal.signal(number, lambda number, _: self._hear(number))
            self._listens = True
        return self._requested

    def _hear(self, number: int) -> None:
        if not self._requested:
            self._asked_at = time.monotonic()
            self.request()
        elif time.monotonic() - self._asked_at > ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def attempt_folder(folder: Path, attempt: int) -> Path:
    """What the ranks of an attempt leave for the launcher."""
    return folder / f"attempt-{attempt}"


def listens(folder: Path) -> bool:
    """Whether the newest attempt of the job in a launch folder would hear a request to stop."""
    attempts = sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
    return bool(attempts) and (attempts[-1] / LISTENING_FILE).exists()
