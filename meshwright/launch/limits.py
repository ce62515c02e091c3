"""Where the machine ends: memory and open files, each in one sentence with what to set, instead of a stack of calls."""

from __future__ import annotations

import errno
import re
import resource
import socket
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.machine import available_memory_bytes

_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_FREE_ON_GPU = re.compile(r"of which ([\d.]+ \w+) is free")
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can('t|not) allocate memory", re.IGNORECASE)

_REMEDY = (
    "set a smaller batch.micro, memory.recompute=auto, memory.offload.to=host, or a layout that cuts the model "
    "over more ranks"
)

_OPEN_FILES = 64
_OPEN_FILES_A_RANK = 8
"""A process's own, and for each rank that it watches or talks to: pipes, sockets of every group."""


def memory_sentence(error: BaseException) -> str | None:
    """What was asked for, what is free, what to set; None where the exception is not of memory that ended."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text)):
        return None
    asked = _ASKED.search(text)
    wanted = "more" if asked is None else f"{_readable(float(asked[1]), asked[2])} more"
    on_gpu = _FREE_ON_GPU.search(text)
    free = f"{on_gpu[1]} of the GPU's" if on_gpu else _readable(free_bytes(), "bytes")
    return f"memory ended: {wanted} asked for, {free} free on {socket.gethostname()}; {_REMEDY}"


def free_bytes() -> int:
    """Host memory that this process can still take: what the machine has, and what `ulimit -v` leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = available_memory_bytes()
    if limit != resource.RLIM_INFINITY:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        free = min(free, max(0, limit - taken))
    return free


def _readable(number: float, unit: str) -> str:
    if unit != "bytes":
        return f"{number:g} {unit}"
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number / 2**20:.1f} MiB"


def open_files_sentence(error: BaseException) -> str | None:
    """What to set; None where the exception is not of too many open files."""
    if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have {limit} files open, and needs more: ulimit -n 4096"


def allow_open_files(num_ranks: int) -> None:
    """Raise this process's limit on open files to what a job of so many ranks needs; its workers inherit it.

    Raises LaunchError where it may not, before a rank fails for it half-way, in a library that names another cause.
    """
    needed = _OPEN_FILES + _OPEN_FILES_A_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = f"a job of {num_ranks} ranks needs {needed} open files a process, and {hard} are allowed here"
        raise LaunchError(f"{text}: ulimit -n {max(1024, needed)}, or the same in /etc/security/limits.conf")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
