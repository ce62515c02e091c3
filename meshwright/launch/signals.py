"""The launcher's signals: the first Ctrl-C asks the workers to stop softly, the second kills them.

SIGTERM may reach the whole tree of processes at once (Slurm, systemd, docker). Workers and the fork server ignore it,
and mpiexec has it blocked, so that it is a request here as well: only the launcher ends processes, with SIGKILL.

The request to stop softly, as a worker sees it: finish the step, write a checkpoint, return.

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
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

STOP_FILE = "stop"
LISTENING_FILE = "listening"
JOINED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

STOPPED_EXIT_CODE = os.EX_TEMPFAIL
"""A run that was asked to stop, finished its step and saved ends with 75: a batch script knows to queue it again."""

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
    """The folder in which the ranks of an attempt leave reports and results for the launcher."""
    return folder / f"attempt-{attempt}"


def listens(folder: Path) -> bool:
    """Whether the newest attempt of the job in a launch folder would hear a request to stop."""
    attempts = sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
    return bool(attempts) and (attempts[-1] / LISTENING_FILE).exists()


GRACE_SECONDS = 30.0
"""How long workers may take to finish a step and write a checkpoint, before they are killed."""

LAUNCHER_ECHO_SECONDS = 0.2
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
            if time.monotonic() - self._received_at < LAUNCHER_ECHO_SECONDS:
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
