"""Watchdog: a thread of each rank that ends the rank after too long a wait for another.

    a rank waits longer than the timeout ── marks the job as hung ── every rank's watchdog sees the mark
    each rank writes a record with the stacks of all threads ── and ends the process

A rank's record is the file rank-R.json in the status folder, replaced every second or so while the rank lives. A rank
that is stopped or spins inside a library writes no stacks; the last record and other ranks' records describe that rank.
The launcher makes one message of the records (hang.py). Under another launcher the first rank that gave up does.
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
"""The exit code of a rank that gave up, equal to the exit code of the command `timeout`."""

POLL_SECONDS = 0.5
RECORD_SECONDS = 1.0
"""Seconds between two records of a living rank."""

MOST_FRAMES = 12
"""The most innermost frames of a stack in a record."""

MEETING_SECONDS = 0.02
"""Seconds between two polls for ranks that have started."""

EVIDENCE_SECONDS = 2.0
"""Seconds that a rank which gave up waits for the other ranks' records."""


class Watchdog:
    """A context that watches this rank: under any launcher, only the rank knows the pending collective and the stacks.

    gloo's waits and mpi4py's verbs release Python's lock, so that the thread runs. Without `environment.status_folder`
    the watchdog cannot read other ranks' records, and prints this rank's. `give_up` ends the process; tests pass
    another function.
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
        # At once, so that a rank that hangs before the first `look` has recorded host and process.
        self._last = self._record("running")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._leave_record(self._last)
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        # Joined first: the thread's last record could overwrite the record `ended`.
        self._thread.join()
        self._leave_record(self._record("ended"))

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self.look()

    def look(self) -> None:
        """Give up if this rank has waited too long or another gave up; else write a record every RECORD_SECONDS."""
        wait = self.recorder.longest_wait()
        if wait is not None and wait[1] > self._limit:
            self._end(marks=True)
        elif self._mark() != self._marked_before:
            self._end(marks=False)
        elif self.recorder.clock() - self._last.seconds >= RECORD_SECONDS:
            self._leave_record(self._record("running"))

    def meet(self) -> None:
        """Return when every rank of our own launcher has written a record. Raises LaunchError with the missing ranks.

        MPI_Init holds Python's lock, so no watchdog runs while MPI_Init waits for a missing rank.
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
        """Set the limit to `timeout.wait`, since all ranks have joined.

        `attempt`: the number common to all ranks, whatever each launcher has counted. Records and marks with another
        number belong to earlier attempts.
        """
        if attempt != self.environment.attempt:
            self.environment = replace(self.environment, attempt=attempt)
            self._marked_before = self._mark()
        self._limit = self._timeout.wait

    def _end(self, *, marks: bool) -> None:
        """Write the last record, give other ranks time to do so, and end the process."""
        self._over.set()
        # A stopped process cannot report: the rank that gives up checks the silent ranks of the same host.
        stopped = [record.rank for record in self._silent() if process_state(record.pid) in ("T", "t")]
        self._leave_record(replace(self._record("hung"), stacks=_stacks(), stopped=stopped))
        if marks and self._folder is not None:
            with suppress(OSError):
                # The record before the mark: a rank that sees the mark can read the record that explains the mark.
                (self._folder / f"hung-{self.environment.attempt}").touch()
        # Files, not sockets: files need no port, and can be read afterwards.
        deadline = self.recorder.clock() + EVIDENCE_SECONDS
        while self.recorder.clock() < deadline and any(record.state == "running" for record in self._records()):
            time.sleep(POLL_SECONDS / 5)
        records = self._records()
        # One message, not one per rank; for ranks that our own launcher started, the launcher writes the message.
        first = min(record.rank for record in records if record.state == "hung")
        if not self.environment.launched and first == self.environment.rank:
            self._tell(f"meshwright: {explain_hang(records)}")
        for record in self._silent():  # stopped, or busy in a library: a launcher's SIGTERM would wait long
            with suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
        self._give_up(EXIT_CODE)

    def _silent(self) -> list[Record]:
        """Return the last records of this host's ranks that have not given up yet."""
        here = [record for record in self._records()[1:] if record.host == self._last.host]
        return [record for record in here if record.state == "running"]

    def _records(self) -> list[Record]:
        """Return all known records of the job, this rank's first."""
        records = [] if self._folder is None else read_records(self._folder, self.environment.attempt)
        mine = self._last
        return [mine, *(record for record in records if record.rank != mine.rank)]

    def _leave_record(self, record: Record) -> None:
        self._last = record
        if self._folder is not None:
            with suppress(OSError):  # a full or lost disk: the run continues without status files
                record.write(self._folder)

    def _mark(self) -> int | None:
        """Return the time of this attempt's last mark, None without one. A mark at the start is an older job's."""
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
    """Return the Python stacks of all threads except this one, by thread name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).rstrip()
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
