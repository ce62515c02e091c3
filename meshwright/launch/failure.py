"""Why a job died: what failed ranks wrote before they left, and which of them was the first cause.

A rank that raises leaves a report with the time of its exception. A rank that is killed leaves none; only its parent
knows its exit status. The others then often fail as well, because their connections break. `explain` names one cause.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.errors import LaunchError, MeshwrightError

LINGER_SECONDS = 0.5
"""How long a rank that raised stays alive, so that the launcher sees a killed rank before the ranks that it took along.

Several times the launchers' polling interval."""


class Interrupted(LaunchError):
    """The job stopped because the user asked: by Ctrl-C, SIGTERM or SIGHUP, which is `signal`."""

    def __init__(self, text: str, number: signal.Signals) -> None:
        self.signal = number
        super().__init__(text)

    @property
    def exit_code(self) -> int:
        """What a shell expects from a process that a signal ended: 130 for Ctrl-C."""
        return 128 + int(self.signal)


@dataclass(frozen=True)
class Report:
    """A failed rank's last words. `details`: its traceback; empty for a user's mistake, whose text says all."""

    rank: int
    nanoseconds: int
    summary: str
    details: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Report:
        """The report on an exception being handled."""
        if isinstance(error, MeshwrightError):
            return cls(rank, time.time_ns(), str(error), "")
        if isinstance(error, SystemExit):
            return cls(rank, time.time_ns(), f"it called exit with {error.code!r}", "")
        lines = str(error).strip().splitlines() or [""]
        summary = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
        return cls(rank, time.time_ns(), summary, "".join(traceback.format_exception(error)).rstrip())

    def write(self, folder: Path, attempt: int) -> None:
        """Leave the report where `read_reports` finds it, whole or not at all."""
        target = _attempt_folder(folder, attempt) / f"rank-{self.rank}.json"
        target.parent.mkdir(exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(target)

    def __str__(self) -> str:
        text = f"rank {self.rank} failed: {self.summary}"
        return f"{text}\n{self.details}" if self.details else text


@dataclass(frozen=True)
class Death:
    """A rank's exit as its parent saw it; a negative `status` is the signal that killed it."""

    rank: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"rank {self.rank} exited with code {self.status} and left no message"
        return f"rank {self.rank} was killed by {signal_name(-self.status)}{_hint(-self.status)}"


def read_reports(folder: Path, attempt: int) -> list[Report]:
    """The reports of an attempt, earliest first."""
    reports = [Report(**json.loads(path.read_text())) for path in _attempt_folder(folder, attempt).glob("rank-*.json")]
    return sorted(reports, key=lambda report: report.nanoseconds)


def explain(death: Death, reports: list[Report]) -> str:
    """The message on a job whose first seen dead rank is `death`: that rank if it was killed, else the first exception.

    An abort is not taken for a cause where another rank has reported: communication libraries abort on a lost peer.
    """
    reported = any(report.rank == death.rank for report in reports)
    aborted = death.status == -signal.SIGABRT
    if reports and (reported or aborted):
        return str(reports[0])
    return str(death)


def _attempt_folder(folder: Path, attempt: int) -> Path:
    return folder / f"attempt-{attempt}"


def signal_name(number: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _hint(number: int) -> str:
    return "; if nobody killed it, the machine ran out of memory" if number == signal.SIGKILL else ""


def leave() -> None:
    """End this process after its report: at once for the others' sake, without exit handlers that wait for peers."""
    time.sleep(LINGER_SECONDS)
    os._exit(1)
