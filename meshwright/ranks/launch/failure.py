"""Failure reports of ranks, and the choice of one first cause for a failed job.

A rank that raises writes a report with the exception's time. A killed rank writes none: only its parent knows the exit
status. Other ranks often fail afterwards, since connections break. `explain_failure` names one cause.

Out of memory and too many open files are reported in one sentence with a remedy, instead of a traceback.
"""

from __future__ import annotations

import errno
import json
import re
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import LaunchError, MeshwrightError
from meshwright.ranks.launch.signals import STOPPED_EXIT_CODE, attempt_folder
from meshwright.ranks.machine import available_memory_bytes

_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_FREE_ON_GPU = re.compile(r"of which ([\d.]+ \w+) is free")
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can('t|not) allocate memory", re.IGNORECASE)

_REMEDY = (
    "set a smaller batch.micro, memory.recompute=auto, memory.offload.to=host, or a layout that cuts the model "
    "over more ranks"
)

_COMPILERS = ("torch._dynamo.", "torch._inductor.")
"""Packages that define the errors of torch.compile itself; an error raised by compiled code keeps its own class."""

_OPEN_FILES = 64
_OPEN_FILES_A_RANK = 8
"""Open files of a process, and more per rank of the job: pipes and the sockets of every group."""


def memory_sentence(error: BaseException) -> str | None:
    """Describe a failed allocation: bytes asked for, bytes free, settings to change. None for other exceptions."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text)):
        return None
    asked = _ASKED.search(text)
    wanted = "more" if asked is None else f"{_readable(float(asked[1]), asked[2])} more"
    on_gpu = _FREE_ON_GPU.search(text)
    free = f"{on_gpu[1]} of the GPU's" if on_gpu else _readable(free_bytes(), "bytes")
    return f"memory ended: {wanted} asked for, {free} free on {socket.gethostname()}; {_REMEDY}"


def free_bytes() -> int:
    """Return the bytes that this process can still allocate: the machine's free memory, or less under `ulimit -v`."""
    # `ulimit -v` limits the process's virtual size.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = available_memory_bytes()
    if limit != resource.RLIM_INFINITY:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        free = min(free, max(0, limit - taken))
    return free


def _readable(amount: float, unit: str) -> str:
    if unit != "bytes":
        return f"{amount:g} {unit}"
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**27 else f"{amount / 2**20:.1f} MiB"


def open_files_sentence(error: BaseException) -> str | None:
    """Name the limit on open files to set; None if the exception has another cause."""
    if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have {limit} files open, and needs more: ulimit -n 4096"


def allow_open_files(num_ranks: int) -> None:
    """Raise this process's limit on open files, inherited by workers, to the need of a job of `num_ranks` ranks.

    Raises LaunchError if the hard limit is lower: a rank would fail later, in a library that names another cause.
    """
    needed = _OPEN_FILES + _OPEN_FILES_A_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = f"a job of {num_ranks} ranks needs {needed} open files a process, and {hard} are allowed here"
        raise LaunchError(f"{text}: ulimit -n {max(1024, needed)}, or the same in /etc/security/limits.conf")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


LINGER_SECONDS = 0.5
"""Seconds between a rank's report and its exit. The launcher sees a killed rank before the ranks that fail in
consequence.

Several times the launchers' polling interval.
"""


class Interrupted(LaunchError):
    """A job stopped on request. `signal`: the request, from Ctrl-C, SIGTERM, SIGHUP or SIGUSR1.

    `saved`: every rank finished its step and returned.
    """

    def __init__(self, text: str, signum: signal.Signals, *, saved: bool = False) -> None:
        self.signal = signum
        self.saved = saved
        # A saved run exits with the code for "queue again"; else with 128 + signal, the shells' convention. Ctrl-C is
        # always 130, so that a script's loop ends too.
        again = saved and signum != signal.SIGINT
        self.exit_code = STOPPED_EXIT_CODE if again else 128 + int(signum)
        super().__init__(text)


@dataclass(frozen=True)
class Failure:
    """The cause of an attempt's failure. `lost`: a process died by no fault of the run. `certain`: another attempt
    would fail too. `rank`: the lost process is a rank, so that `shrink` can continue with fewer."""

    text: str
    lost: bool
    certain: bool = False
    rank: bool = False

    def again(self, before: Failure | None) -> bool:
        """Return whether another attempt may succeed: not after the same exception at the same place twice."""
        return self.lost or not (self.certain or self == before)


@dataclass(frozen=True)
class Report:
    """A failed rank's report. `details`: the traceback; empty for a user's mistake, since the text is complete.

    `nanoseconds`: time of the failure, by the host's monotonic clock. `certain`: a restart would fail again. `host`:
    set if the job may have several hosts.
    """

    rank: int
    nanoseconds: int
    summary: str
    details: str
    certain: bool = False
    host: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Report:
        """Make the report on an exception being handled."""
        if isinstance(error, MeshwrightError):
            return cls(rank, time.monotonic_ns(), str(error), "", certain=not error.restartable)
        if limit := memory_sentence(error) or open_files_sentence(error):
            return cls(rank, time.monotonic_ns(), limit, "", certain=True)
        if isinstance(error, SystemExit):
            return cls(rank, time.monotonic_ns(), f"it called exit with {error.code!r}", "")
        lines = str(error).strip().splitlines() or [""]
        summary = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
        compiling = type(error).__module__.startswith(_COMPILERS)
        if compiling:
            summary = f"torch's compiler failed ({summary}); set compile=islands, or compile=none"
        details = "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, time.monotonic_ns(), summary, details, certain=compiling)

    def write(self, folder: Path, attempt: int) -> None:
        """Write the report for `read_reports`, atomically."""
        target = attempt_folder(folder, attempt) / f"rank-{self.rank}.json"
        target.parent.mkdir(exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(target)

    def __str__(self) -> str:
        name = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
        said = self.summary.startswith((f"{name} ", f"{name}:"))  # a rendezvous's message already names its rank
        text = self.summary if said else f"{name} failed: {self.summary}"
        return f"{text}\n{self.details}" if self.details else text


SERVER = "the fork server that starts the ranks"
STORE = "the process that holds the ranks' store"
MPIEXEC = "mpiexec"
_FIRST = (SERVER, MPIEXEC, STORE)
"""Processes in order of cause, first cause first: ranks and store die with their parent."""
_OWN_FAULTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
"""Signals caused by the process's own fault; all others are sent from outside."""


@dataclass(frozen=True)
class Death:
    """The exit of a process, observed by its parent. `status`: exit code; negative: the fatal signal; None: unknown.

    | who | seen by | taken along | another attempt |
    |---|---|---|---|
    | a rank, by number | its parent: the fork server or mpiexec | waiting ranks | with fewer ranks if `shrink` |
    | SERVER | this process, whose child it is | all ranks, the store | the same ranks, from a new one |
    | STORE | the fork server | ranks that need it | the same ranks, with a new one |
    | MPIEXEC | this process, whose child it is | all ranks | the same ranks |
    """

    who: int | str
    status: int | None
    words: str = ""
    """The last lines of the process's standard error."""
    host: str = field(default_factory=socket.gethostname)

    @property
    def from_outside(self) -> bool:
        """True if the process was ended from outside: by a person, a scheduler, the kernel's out-of-memory killer."""
        return self.status is None or (self.status < 0 and -self.status not in _OWN_FAULTS)

    @property
    def order(self) -> tuple[int, bool, int]:
        """The sort key of an attempt's deaths: the least is the cause."""
        if isinstance(self.who, str):
            return _FIRST.index(self.who), False, 0
        # Killed ranks before ranks that exited with an error, perhaps because connections to a killed rank broke.
        return len(_FIRST), self.status is not None and self.status > 0, self.who

    def __str__(self) -> str:
        name = f"rank {self.who}" if isinstance(self.who, int) else self.who
        if self.status is None:
            ended = f"{name} has died on {self.host}"
        elif self.status < 0:
            # The kernel's out-of-memory killer sends SIGKILL, and writes only to the kernel's log.
            memory = -self.status == signal.SIGKILL and isinstance(self.who, int)
            hint = "; if nobody killed it, the machine ran out of memory" if memory else ""
            ended = f"{name} was killed by {signal_name(-self.status)} on {self.host}{hint}"
        else:
            ended = f"{name} exited with code {self.status} and left no message, on {self.host}"
        return f"{ended}; the end of its standard error:\n{self.words}" if self.words else ended


LastWords = Callable[[int], str]
"""The last lines of the standard error of a rank that has ended."""


def read_results(folder: Path, attempt: int, num_ranks: int) -> list[Any]:
    """Read the results of a successful attempt, in rank order; None for a rank that exited early with code 0."""
    paths = [attempt_folder(folder, attempt) / f"result-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def read_reports(folder: Path, attempt: int) -> list[Report]:
    """Read the reports of an attempt, earliest first."""
    reports = [Report(**json.loads(path.read_text())) for path in attempt_folder(folder, attempt).glob("rank-*.json")]
    return sorted(reports, key=lambda report: report.nanoseconds)


def explain_failure(death: Death, reports: list[Report]) -> Failure:
    """Name the first cause of a job's failure: `death` or the earliest report.

    `death` is the first death seen. A process killed from outside is the cause if that rank left no report. Else the
    earliest report is. An abort is no cause if any rank has reported: libraries abort on a lost peer.
    """
    rank = isinstance(death.who, int)
    reported = any(report.rank == death.who for report in reports)
    aborted = death.status == -signal.SIGABRT
    if reports and (reported or aborted or not (rank or death.from_outside)):
        return Failure(str(reports[0]), lost=False, certain=reports[0].certain)
    # A process lost from outside may be lost again, and is replaced each time.
    return Failure(str(death), lost=rank or death.from_outside, rank=rank)


def signal_name(signum: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:  # real-time signals have no name
        return f"signal {signum}"
