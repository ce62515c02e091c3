"""Folders published atomically, and checksums that detect and locate damaged bytes.

A folder is written under a temporary name in the same parent folder, with a lock held, synced to disk, then renamed. A
killed process leaves a hidden `.NAME.partial`, which is never read; the next holder of the lock removes the folder. The
kernel frees the lock (flock) when the holder dies. (The package filelock would leave a file in the parent folder.)

Checksums are checked once, not at every start. The cache stores a passed check by the file's path, with size, times and
inode, so a second run on the same files costs nothing. A disk that changes bits but no times is detected only at the
next check: remove the cache's `checked` folder to force one.

Long work reports through `ShowProgress`: a text, and the share done (0 to 1, None if unknown), for the caller to show.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from meshwright.ranks.errors import DataError

ShowProgress = Callable[[str, float | None], None]


def silent(text: str, done: float | None) -> None:
    """Report nothing."""


class Rate:
    """A reporter of work on texts: characters done, and characters a second. `total`: all characters, if known."""

    def __init__(self, progress: ShowProgress, text: str, total: int | None = None) -> None:
        self._progress, self._text = progress, text
        self._total = total
        self._started = self._told = time.monotonic()
        self._done = 0
        progress(text, None)

    def counted(self, text: str) -> str:
        """Count a text, and return it."""
        self._done += len(text)
        if (now := time.monotonic()) - self._told >= _REPORT_SECONDS:
            self._told = now
            rate = self._done / (now - self._started)
            told = f"{self._text}: {self._done / 1e6:.1f} M characters, {rate / 1e6:.2f} M a second"
            self._progress(told, min(1.0, self._done / self._total) if self._total else None)
        return text


_REPORT_SECONDS = 0.2
REGION_BYTES = 2**20
DAMAGE_REMEDY = "move the folder aside and prepare it again"

Inspect = Callable[[str, int, bytes], str | None]
"""A function inspect(file, offset, bytes of a region) that returns a complaint about the bytes, or None."""


@contextmanager
def folder_lock(out: Path, progress: ShowProgress) -> Iterator[None]:
    """Hold the lock for writing `out`. Waits while another process holds the lock."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f".{out.name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {out}", None)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            # After a wait, the locked file may have been unlinked by the earlier holder: only the file with the name
            # counts.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while locked: a waiting process then finds no file, and retries
        os.close(descriptor)


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Make a folder for writing, renamed to `out` after success, removed after failure. Call under `folder_lock`."""
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        # Contents before the name: after a power cut the folder under its name must be whole.
        for path in [*partial.iterdir(), partial]:
            sync(path)
        partial.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class FileSum:
    """The running SHA-256 of a file's bytes, and a CRC-32 of every region of REGION_BYTES."""

    _sum: Any = field(default_factory=hashlib.sha256)
    _regions: list[str] = field(default_factory=list)
    _region: int = 0
    _filled: int = 0

    def update(self, data: bytes) -> None:
        self._sum.update(data)
        view = memoryview(data)
        while view:
            chunk = view[: REGION_BYTES - self._filled]
            self._region = crc32(chunk, self._region)
            self._filled += len(chunk)
            view = view[len(chunk) :]
            if self._filled == REGION_BYTES:
                self._regions.append(f"{self._region:08x}")
                self._region = self._filled = 0

    @property
    def sha256(self) -> str:
        return self._sum.hexdigest()

    @property
    def regions(self) -> tuple[str, ...]:
        return (*self._regions, *([f"{self._region:08x}"] if self._filled else []))


def file_sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_once(
    folder: Path,
    sums: Mapping[str, str],
    regions: Mapping[str, Sequence[str]],
    cache: Path,
    inspect: Inspect = lambda *_: None,
) -> None:
    """Compare files with checksums, unless an earlier check passed and the file is unchanged since.

    Raises DataError, which names the file and, if `regions` has the file, the bytes.
    """
    for name, wanted in sorted(sums.items()):
        path = folder / name
        about = path.stat()
        # ctime too: a program can set a file's mtime back, but not the ctime.
        facts = [wanted, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
        stamp = cache / "checked" / f"{key}.json"
        with suppress(OSError, ValueError):
            if json.loads(stamp.read_text()) == facts:
                continue
        check_file(path, wanted, regions.get(name, ()), inspect)
        with suppress(OSError):  # a cache that cannot be written costs the next run another check
            stamp.parent.mkdir(parents=True, exist_ok=True)
            # A name with this process's id, since several processes may check the same file.
            partial = stamp.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(facts))
            partial.rename(stamp)


def check_file(path: Path, wanted: str, regions: Sequence[str], inspect: Inspect = lambda *_: None) -> None:
    """Compare a file with a checksum. Raises DataError as `check_once`."""
    total, wrong, complaint = FileSum(), [], None
    try:
        with path.open("rb") as file:
            for region, data in enumerate(iter(lambda: file.read(REGION_BYTES), b"")):
                total.update(data)
                if region < len(regions) and f"{crc32(data):08x}" != regions[region]:
                    wrong.append(region)
                complaint = complaint or inspect(path.name, region * REGION_BYTES, data)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {DAMAGE_REMEDY}") from error
    if total.sha256 != wanted:
        begin, more = (wrong[0] * REGION_BYTES, len(wrong) - 1) if wrong else (0, 0)
        where = f", bytes {begin} to {begin + REGION_BYTES - 1}" if wrong else ""
        others = f" and {more} more regions" if more else ""
        raise DataError(f"{path}: is damaged (its checksum is not the header's){where}{others}; {DAMAGE_REMEDY}")
    if complaint is not None:
        raise DataError(f"{path}: {complaint}; {DAMAGE_REMEDY}")
