"""The temporary folders of one launch, removed even after `kill -9` of the launcher, mpiexec or the ranks.

All that a launch writes outside of the run's own folder lies in a session folder: our job, reports and socket, Open
MPI's session files (it is the ranks' TMPDIR), and, in shared memory, the segments through which Open MPI's ranks talk.
The launcher holds a lock on a file in each folder, which the kernel frees when the launcher dies. A folder whose lock
is free is a dead launcher's, and the next launch removes it. (A process id would not do: in containers that share /tmp,
the same number is another process.)
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

from meshwright.ranks.errors import LaunchError

_PREFIX = "meshwright-"
_LOCK = "launcher.lock"
_SHARED_MEMORY = Path("/dev/shm")
_FORK_SERVER_PREFIX = "pymp-"
"""multiprocessing's name for the folder of its fork server's socket."""


@dataclass(frozen=True)
class Session:
    """`folder`: the launch's own; `shared`: one in shared memory, or `folder` if the machine has none."""

    folder: Path
    shared: Path


@contextmanager
def open_session() -> Iterator[Session]:
    """A context with new folders for a launch, removed at its end; removes folders of dead launchers first.

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
    """A context with a new temporary folder, removed at its end, or by the next launch if this process is killed."""
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
    """Take the folder's lock until the returned descriptor is closed; not inherited by exec."""
    fresh = folder / f"{_LOCK}.new"
    lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fresh.rename(folder / _LOCK)  # visible to a sweep only now, when it is taken
    return lock


def make_fork_server_folder() -> Path:
    """The folder of this process's fork server, made with a lock so that a sweep removes it after a `kill -9`.

    multiprocessing removes it at a normal exit; until then the lock's descriptor stays open. An existing folder is left
    alone: it is locked, or belongs to the process that forked this one.
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
