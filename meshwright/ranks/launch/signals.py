"""Signals of the launcher, and the stop requests of workers.

The first Ctrl-C asks the workers to stop softly: finish the step, write a checkpoint, return. The second kills the
workers. SIGTERM may reach the whole process tree at once (Slurm, systemd, docker). Workers and the fork server ignore
SIGTERM, and mpiexec has SIGTERM blocked: only the launcher ends processes, by SIGKILL.

Under our own launcher the request is a file in the launch folder. Unlike a signal, a file cannot be lost and cannot
kill a worker during imports. mpiexec and torch need no different code. Inside another launcher (torchrun, srun,
mpirun) the request is a forwarded SIGTERM, SIGINT or SIGUSR1.

A worker listens from the first query of `StopRequest.requested` on, in the first step. Before that nothing can be
saved, and the worker may wait for ranks that never start: a signal then ends the worker at once.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

STOP_FILE = "stop"
LISTENING_FILE = "listening"
JOINED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

STOPPED_EXIT_CODE = os.EX_TEMPFAIL
"""Exit code 75 of a run that stopped on request and saved: a batch script can queue the run again."""

ECHO_SECONDS = 1.0
"""A signal repeated within these seconds is the same request: torchrun and srun forward signals that workers have."""


class StopRequest:
    """A request to stop softly, passed to the entry function.

    Ranks may observe the request at different steps, and must agree before stopping. The base class is never requested
    from outside.
    """

    _requested = False

    @property
    def requested(self) -> bool:
        """True once a stop was requested, and from then on. Takes a few microseconds: query once a step."""
        return self._requested

    def request(self) -> None:
        """Ask this process to stop."""
        self._requested = True


@dataclass
class FileStop(StopRequest):
    """A stop request by a file in the launch folder. The first query writes a file: this attempt listens."""

    folder: Path
    attempt: int
    _listens: bool = field(default=False, init=False)

    @property
    def requested(self) -> bool:
        if not self._listens:
            listening = attempt_folder(self.folder, self.attempt) / LISTENING_FILE
            listening.parent.mkdir(exist_ok=True)
            listening.touch()
            self._listens = True
        if not self._requested and (self.folder / STOP_FILE).exists():
            self.request()
        return self._requested


class SignalStop(StopRequest):
    """A stop request by a signal of JOINED_SIGNALS, from the first query on. Main thread only.

    A second signal ends the process at once. So does any signal before the first query.
    """

    def __init__(self) -> None:
        self._listens = False
        self._asked_at = 0.0
        for signum in JOINED_SIGNALS:  # Python's KeyboardInterrupt waits until calls into libraries return
            signal.signal(signum, signal.SIG_DFL)

    @property
    def requested(self) -> bool:
        if not self._listens:
            for signum in JOINED_SIGNALS:
                signal.signal(signum, lambda signum, _: self._hear(signum))
            self._listens = True
        return self._requested

    def _hear(self, signum: int) -> None:
        if not self._requested:
            self._asked_at = time.monotonic()
            self.request()
        elif time.monotonic() - self._asked_at > ECHO_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Return the folder of an attempt's reports and results, written by ranks for the launcher."""
    return folder / f"attempt-{attempt}"


def listens(folder: Path) -> bool:
    """Return whether the newest attempt of a launch folder's job listens to a stop request."""
    attempts = sorted(folder.glob("attempt-*"), key=lambda path: int(path.name.removeprefix("attempt-")))
    return bool(attempts) and (attempts[-1] / LISTENING_FILE).exists()


GRACE_SECONDS = 30.0
"""Seconds for workers to finish a step and write a checkpoint before they are killed."""

LAUNCHER_ECHO_SECONDS = 0.2
"""A signal repeated within these seconds is the same request: `timeout` signals its child, then the child's group."""

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NOTICE = b"\nstopping after this step; once more kills the workers at once\n"


class KillWorkers(BaseException):
    """An order to kill the workers, raised by a signal handler. No Exception, so that no library swallows the order."""


@dataclass
class StopSignals:
    """A context that turns the signals of _ASKING into the file read by the workers' StopRequest. Main thread only.

    KillWorkers is raised in the main thread by a signal before the job's first step, since nothing can be saved; by a
    second signal; and GRACE_SECONDS after the first. A signal that was ignored before (nohup) stays ignored.
    """

    folder: Path
    received: signal.Signals | None = field(default=None, init=False)
    _received_at: float = field(default=0.0, init=False)
    _before: dict[signal.Signals, signal.Handlers] = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        for signum in _ASKING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._ask)  # type: ignore[assignment]
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._ask)  # type: ignore[assignment]
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGALRM:  # GRACE_SECONDS are over
            raise KillWorkers
        if self.received is not None:
            if time.monotonic() - self._received_at < LAUNCHER_ECHO_SECONDS:
                return
            raise KillWorkers
        self.received = signal.Signals(signum)
        self._received_at = time.monotonic()
        (self.folder / STOP_FILE).touch()
        if not listens(self.folder):
            raise KillWorkers
        with suppress(OSError):  # our stderr is closed
            os.write(2, _NOTICE)  # print is not re-entrant
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
