"""The folders of one launch, which nobody finds left behind: not after `kill -9` of the launcher, mpiexec or the ranks.

All that a launch writes outside of the run's own folder lies in a session folder: our job, reports and socket, Open
MPI's session files (it is the ranks' TMPDIR), and, in shared memory, the segments through which Open MPI's ranks talk.
The launcher holds a lock on a file in each. The kernel frees it when the launcher dies, however that happens; so a
folder whose lock can be had is a dead launcher's, and the next launch removes it. (A process id would not do: in
containers that share /tmp, the same number is another process.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path

from meshwright.errors import LaunchError

_PREFIX = "meshwright-"
_LOCK = "launcher.lock"
_SHARED_MEMORY = Path("/dev/shm")
_FORK_SERVER_PREFIX = "pymp-"
"""multiprocessing's name for the folder of its fork server's socket."""


@dataclass(frozen=True)
class Session:
    """`folder`: the launch's own; `shared`: one in shared memory, or the same where the machine has none."""

    folder: Path
    shared: Path


@contextmanager
def open_session() -> Iterator[Session]:
    """New folders for a launch, removed at the end; those of dead launchers are removed first.

    Raises LaunchError where the temporary folder cannot be written to.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        shared = folder
        if os.access(_SHARED_MEMORY, os.W_OK):
            sweep(_SHARED_MEMORY)
            shared = stack.enter_context(_locked_folder(_SHARED_MEMORY))
        yield Session(folder, shared)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new temporary folder of a process that launches, which the next launch removes where this process cannot."""
    parent = Path(tempfile.gettempdir())
    sweep(parent)
    with _locked_folder(parent) as folder:
        yield folder


@contextmanager
def _locked_folder(parent: Path) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _lock(folder)
    except OSError as error:
        raise LaunchError(f"no folder can be made in {parent} ({error.strerror}): set TMPDIR to another one") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """Take the folder's lock, for as long as the descriptor is open. Children that are started by exec don't get it."""
    fresh = folder / f"{_LOCK}.new"
    lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fresh.rename(folder / _LOCK)  # seen by a sweep only now that it is taken
    return lock


def make_fork_server_folder() -> Path:
    """Make the folder of this process's fork server, marked as ours for the sweep after a `kill -9`; where it is.

    multiprocessing removes it at the orderly end; the lock's descriptor is left open until then. A folder that
    is there already stays as it is: it is marked, or belongs to the process that forked this one and lives longer.
    """
    temporary = Path(tempfile.gettempdir())
    there = set(temporary.glob(f"{_FORK_SERVER_PREFIX}*"))
    folder = Path(get_temp_dir())
    if folder.parent == temporary and folder not in there:  # else it is older than this process's TMPDIR
        _lock(folder)
    return folder


def sweep(parent: Path) -> None:
    """Remove this user's session folders whose launcher is dead."""
    for prefix in (_PREFIX, _FORK_SERVER_PREFIX):
        for folder in parent.glob(f"{prefix}*"):
            # A folder without a lock is not ours, or was made this moment; it may be gone, or another user's.
            with suppress(OSError):
                lock = os.open(folder / _LOCK, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its launcher lives
                    if os.fstat(lock).st_uid == os.getuid():
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
