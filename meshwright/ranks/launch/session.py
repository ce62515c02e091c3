"""The temporary folders of one launch, removed even after `kill -9` of the launcher, mpiexec or the ranks.

Outside of the run's own folder, a launch writes only to session folders. One holds job, reports and socket, and Open
MPI's session files, since the folder is the ranks' TMPDIR. One in shared memory holds the segments used by Open MPI's
ranks. The launcher holds a lock on a file in each folder; the kernel frees the lock when the launcher dies. The next
launch removes folders with a free lock. (A process id would not identify a dead launcher: in containers that share
/tmp, the same number is another process.)
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
    """The folders of one launch. `shared`: the folder in shared memory, or `folder` if the machine has none."""

    folder: Path
    shared: Path


@contextmanager
def open_session() -> Iterator[Session]:
    """Remove folders of dead launchers; then open a context with new folders, removed at the context's end.

    Raises LaunchError if the temporary folder cannot be written to.
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
    """Open a context with a new temporary folder, removed at the end, or by the next launch after a `kill -9`."""
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
    """Take the folder's lock until the returned descriptor is closed. exec does not inherit the descriptor."""
    fresh = folder / f"{_LOCK}.new"
    lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    fresh.rename(folder / _LOCK)  # visible to a sweep only now, when it is taken
    return lock


def make_fork_server_folder() -> Path:
    """Make the folder of this process's fork server, with a lock, so that a sweep removes the folder after `kill -9`.

    multiprocessing removes the folder at a normal exit; until then the lock's descriptor stays open. An existing folder
    is not changed: it is locked, or belongs to the process that forked this one.
    """
    temporary = Path(tempfile.gettempdir())
    there = set(temporary.glob(f"{_FORK_SERVER_PREFIX}*"))
    folder = Path(get_temp_dir())
    if folder.parent == temporary and folder not in there:  # else made under another TMPDIR
        _lock(folder)
    return folder


def sweep(parent: Path) -> None:
    """Remove this user's session folders whose launcher is dead."""
    for prefix in (_PREFIX, _FORK_SERVER_PREFIX):
        for folder in parent.glob(f"{prefix}*"):
            # OSError: a folder without a lock (not ours, or just created), a removed folder, or another user's.
            with suppress(OSError):
                lock = os.open(folder / _LOCK, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the launcher lives
                    if os.fstat(lock).st_uid == os.getuid():
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
