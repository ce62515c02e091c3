"""A folder that appears whole or not at all: written beside its place under a lock, synced to disk, then renamed.

A process that is killed leaves a hidden `.NAME.partial` behind, which nobody reads; the next one to hold the lock
removes it. The lock is the kernel's (flock), so it falls with its holder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.data.progress import ShowProgress


@contextmanager
def folder_lock(out: Path, progress: ShowProgress) -> Iterator[None]:
    """Hold the right to write `out`. Waits while another process holds it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f".{out.name}.lock"
    descriptor = _lock(path, out, progress)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while the lock is held: who waits for it sees a file that is gone, and retries
        os.close(descriptor)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A folder to write in, renamed to `out` if the block ends well and removed if not. Call under `folder_lock`."""
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        partial.rename(out)
        _sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _lock(path: Path, out: Path, progress: ShowProgress) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {out}", None)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
