"""The watchdog: a thread of each rank that ends it when it has waited for another rank for too long.

    rank waits longer than its timeout ── marks the job as hung ── every rank's watchdog sees the mark
    each leaves its record with the stacks of all its threads ── and ends its process

A rank's record lies in the status folder as rank-R.json, and is replaced every few seconds while the rank lives. A rank
that is stopped or spins inside a library leaves no stacks; the others' records and its own last one tell of it.
The launcher, or the first rank where another launcher started it, makes one message of the records (hang.py).
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
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.environment import Environment
from meshwright.errors import LaunchError
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.hang import Record, State, absent, explain_hang, process_state, read_records
from meshwright.ranks.section import Timeout

EXIT_CODE = 124
"""The exit code of a rank that gave up; the command `timeout` has the same."""

POLL_SECONDS = 0.5
RECORD_SECONDS = 1.0
"""Between two records of a rank that lives."""

MOST_FRAMES = 12
"""Innermost frames of a stack that a record holds."""

MEETING_SECONDS = 0.02
"""Between two looks at who has come to the start."""

EVIDENCE_SECONDS = 2.0
"""How long a rank that gave up waits for the records of the others: some looks."""


class Watchdog:
    """Watches a rank while entered. It is a thread of the rank's own, not of its launcher's: only the rank knows its
    collective and stacks, and it works inside other launchers. gloo's waits and mpi4py's verbs release Python's lock.

    Without `environment.status_folder` it can ask no other rank, and prints what it knows. `give_up` ends the process;
    a test hands in another, and a clock.
    """

    def __init__(
        self,
        environment: Environment,
        recorder: FlightRecorder,
        timeout: Timeout,
        give_up: Callable[[int], object] = os._exit,
        tell: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.environment = environment
        self.recorder = recorder
        self._timeout = timeout
        self._limit = timeout.join
        self._give_up, self._tell = give_up, tell
        self._folder = environment.status_folder
        self._marked_before = self._mark()
        # At once: a rank that hangs before its first look has told its host and process.
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
        # Else its last record could come after the one that says that the rank has ended.
        self._thread.join()
        self._leave_record(self._record("ended"))

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Give up where this rank has waited too long or another has given up; else leave a record now and then."""
        wait = self.recorder.longest_wait()
        if wait is not None and wait[1] > self._limit:
            self._end(marks=True)
        elif self._mark() != self._marked_before:
            self._end(marks=False)
        elif self.recorder.clock() - self._last.seconds >= RECORD_SECONDS:
            self._leave_record(self._record("running"))

    def meet(self) -> None:
        """Return when every rank of our own launcher's has left a record. Raises LaunchError that says who has not.

        MPI starts under Python's lock: a rank that waited in there for one that never comes could not be watched.
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
        """The rank has met the others: from now on it may wait as long as `timeout.wait` says.

        `attempt`: the job's number that all of them have, whatever restarts each one's launcher has counted; records
        and marks of another number are of ranks that are gone.
        """
        if attempt != self.environment.attempt:
            self.environment = replace(self.environment, attempt=attempt)
            self._marked_before = self._mark()
        self._limit = self._timeout.wait

    def _end(self, *, marks: bool) -> None:
        """Leave the last record, give the others time for theirs, and end the process."""
        self._over.set()
        # A stopped process cannot say so itself: who gives up looks at the silent ranks of its host.
        stopped = [record.rank for record in self._silent() if process_state(record.pid) in ("T", "t")]
        self._leave_record(replace(self._record("hung"), stacks=_stacks(), stopped=stopped))
        if marks and self._folder is not None:
            with suppress(OSError):
                # The record first, then the mark: who sees the mark finds the record that explains it.
                self._marker(self._folder).touch()
        # Files, not sockets: they need no port, and stay for whoever reads them afterwards.
        deadline = self.recorder.clock() + EVIDENCE_SECONDS
        while self.recorder.clock() < deadline and any(record.state == "running" for record in self._records()):
            time.sleep(POLL_SECONDS / 5)
        records = self._records()
        # One message and not one a rank; our own launcher writes it where it has started the ranks.
        first = min(record.rank for record in records if record.state == "hung")
        if not self.environment.launched and first == self.environment.rank:
            self._tell(f"meshwright: {explain_hang(records)}")
        for record in self._silent():  # stopped, or busy in a library: its launcher would ask politely, for long
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
        self._give_up(EXIT_CODE)

    def _silent(self) -> list[Record]:
        """The last records of this host's ranks that have not answered so far."""
        here = [record for record in self._records()[1:] if record.host == self._last.host]
        return [record for record in here if record.state == "running"]

    def _records(self) -> list[Record]:
        """All that is known of the job: at least this rank's own record."""
        records = [] if self._folder is None else read_records(self._folder, self.environment.attempt)
        mine = self._last
        return [mine, *(record for record in records if record.rank != mine.rank)]

    def _leave_record(self, record: Record) -> None:
        self._last = record
        if self._folder is not None:
            with suppress(OSError):  # a full or a lost disk: the run lives without a status
                record.write(self._folder)

    def _marker(self, folder: Path) -> Path:
        return folder / f"hung-{self.environment.attempt}"

    def _mark(self) -> int | None:
        """When a rank of this attempt said last that it has given up. A mark that was there at the start is an older
        job's, whose folder nobody has cleared."""
        if self._folder is None:
            return None
        try:
            return self._marker(self._folder).stat().st_mtime_ns
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
