"""The watchdog: a thread of each rank that ends the rank when it has waited too long for another.

    rank waits longer than its timeout ── marks the job as hung ── every rank's watchdog sees the mark
    each leaves its record with the stacks of all its threads ── and ends its process

A rank's record lies in the status folder as rank-R.json, and is replaced every few seconds while the rank lives. A rank
that is stopped or spins inside a library leaves no stacks; other ranks' records and its own last one describe it. The
launcher, or the first rank where another launcher started it, makes one message of the records (hang.py).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.hang import Record, State, absent, explain_hang, process_state, read_records
from meshwright.ranks.streams import say
from meshwright.ranks.timeouts import Timeouts

EXIT_CODE = 124
"""The exit code of a rank that gave up, the same as the command `timeout` has."""

POLL_SECONDS = 0.5
RECORD_SECONDS = 1.0
"""Seconds between two records of a living rank."""

MOST_FRAMES = 12
"""The most innermost frames of a stack in a record."""

MEETING_SECONDS = 0.02
"""Seconds between two polls of the ranks that have come to the start."""

EVIDENCE_SECONDS = 2.0
"""Seconds that a rank which gave up waits for the other ranks' records."""


class Watchdog:
    """Watches this rank inside the context: only the rank knows its collective and stacks, under any launcher. gloo's
    waits and mpi4py's verbs release Python's lock.

    Without `environment.status_folder` it knows no other ranks' records, and prints its own. `give_up` ends the
    process; tests pass another function.
    """

    def __init__(
        self,
        environment: Environment,
        recorder: FlightRecorder,
        timeout: Timeouts,
        give_up: Callable[[int], object] = os._exit,
        tell: Callable[[str], object] = lambda text: say(text, file=sys.stderr, flush=True),
    ) -> None:
        self.environment = environment
        self.recorder = recorder
        self._timeout = timeout
        self._limit = timeout.join
        self._give_up, self._tell = give_up, tell
        self._folder = environment.status_folder
        self._marked_before = self._mark()
        # At once, so that a rank that hangs before the first look has left its host and process.
        self._last = self._record("running")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._leave_record(self._last)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        # Joined first: the thread's last record could overwrite the one that says `ended`.
        self._thread.join()
        self._leave_record(self._record("ended"))

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Give up if this rank has waited too long or another has given up; else leave a record every
        RECORD_SECONDS."""
        wait = self.recorder.longest_wait()
        if wait is not None and wait[1] > self._limit:
            self._end(marks=True)
        elif self._mark() != self._marked_before:
            self._end(marks=False)
        elif self.recorder.clock() - self._last.seconds >= RECORD_SECONDS:
            self._leave_record(self._record("running"))

    def meet(self) -> None:
        """Return when every rank of our own launcher has left a record. Raises LaunchError with the missing ranks.

        MPI_Init holds Python's lock: a rank that waits in it for a missing rank could not be watched.
        """
        deadline = self.recorder.clock() + self._timeout.join
        while self.environment.launched:
            missing = set(range(self.environment.world_size)) - {record.rank for record in self._records()}
            if not missing:
                return
            if self.recorder.clock() > deadline:
                raise LaunchError(absent(missing, self.environment.world_size, self._timeout.join))
            time.sleep(MEETING_SECONDS)

    def joined(self, attempt: int) -> None:
        """All ranks have met: the limit is `timeout.wait` from now on.

        `attempt`: the number on which all ranks agree, whatever each launcher has counted; records and marks of other
        numbers are of ranks that are gone.
        """
        if attempt != self.environment.attempt:
            self.environment = replace(self.environment, attempt=attempt)
            self._marked_before = self._mark()
        self._limit = self._timeout.wait

    def _end(self, *, marks: bool) -> None:
        """Leave the last record, give the others time for theirs, and end the process."""
        self._over.set()
        # A stopped process cannot report itself: the rank that gives up looks at the silent ranks of its host.
        stopped = [record.rank for record in self._silent() if process_state(record.pid) in ("T", "t")]
        self._leave_record(replace(self._record("hung"), stacks=_stacks(), stopped=stopped))
        if marks and self._folder is not None:
            with suppress(OSError):
                # The record before the mark: a rank that sees the mark finds the record that explains it.
                (self._folder / f"hung-{self.environment.attempt}").touch()
        # Files, not sockets: they need no port, and stay for whoever reads them afterwards.
        deadline = self.recorder.clock() + EVIDENCE_SECONDS
        while self.recorder.clock() < deadline and any(record.state == "running" for record in self._records()):
            time.sleep(POLL_SECONDS / 5)
        records = self._records()
        # One message and not one a rank; our own launcher writes it where it has started the ranks.
        first = min(record.rank for record in records if record.state == "hung")
        if not self.environment.launched and first == self.environment.rank:
            self._tell(f"meshwright: {explain_hang(records)}")
        for record in self._silent():  # stopped, or busy in a library: its launcher would send SIGTERM and wait long
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
        self._give_up(EXIT_CODE)

    def _silent(self) -> list[Record]:
        """The last records of this host's ranks that have not answered yet."""
        here = [record for record in self._records()[1:] if record.host == self._last.host]
        return [record for record in here if record.state == "running"]

    def _records(self) -> list[Record]:
        """All known records of the job, at least this rank's own."""
        records = [] if self._folder is None else read_records(self._folder, self.environment.attempt)
        mine = self._last
        return [mine, *(record for record in records if record.rank != mine.rank)]

    def _leave_record(self, record: Record) -> None:
        self._last = record
        if self._folder is not None:
            with suppress(OSError):  # a full or lost disk: the run goes on without status files
                record.write(self._folder)

    def _mark(self) -> int | None:
        """When a rank of this attempt last marked that it gave up. A mark that exists at the start is an older
        job's."""
        if self._folder is None:
            return None
        try:
            return (self._folder / f"hung-{self.environment.attempt}").stat().st_mtime_ns
        except OSError:
            return None

    def _record(self, state: State) -> Record:
        environment = self.environment
        return Record(
            environment.rank,
            environment.world_size,
            environment.attempt,
            socket.gethostname(),
            os.getpid(),
            state,
            self.recorder.clock(),
            time.time(),
            self.recorder.whereabouts(),
            self._limit,
        )


def _stacks() -> dict[str, str]:
    """The Python stacks of all threads but this one, by the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).rstrip()
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
