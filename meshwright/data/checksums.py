"""Checksums of packed files: kept by regions too, so that damage is located; checked once, not at every start.

A check's result is kept in the cache under the file's path, with its size, times and inode. So the second run on the
same files costs nothing. A disk that changes bits without touching the file's times is met at the next check only:
remove the cache's `checked` folder to ask for one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from meshwright.errors import DataError

REGION_BYTES = 2**20
REMEDY = "remove the folder and prepare it again"

Inspect = Callable[[str, int, bytes], str | None]
"""inspect(file, offset, bytes of a region): what is wrong with them, or None."""


class FileSum:
    """The SHA-256 of a file's bytes as they pass by, and a CRC-32 of every region of REGION_BYTES."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()
        self._regions: list[str] = []
        self._region = 0
        self._filled = 0

    def update(self, data: bytes) -> None:
        self._sum.update(data)
        view = memoryview(data)
        while view:
            part = view[: REGION_BYTES - self._filled]
            self._region = crc32(part, self._region)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == REGION_BYTES:
                self._regions.append(f"{self._region:08x}")
                self._region = self._filled = 0

    @property
    def sha256(self) -> str:
        return self._sum.hexdigest()

    @property
    def regions(self) -> tuple[str, ...]:
        return (*self._regions, *([f"{self._region:08x}"] if self._filled else []))


def check_once(
    folder: Path,
    sums: Mapping[str, str],
    regions: Mapping[str, Sequence[str]],
    cache: Path,
    inspect: Inspect = lambda *_: None,
) -> None:
    """Compare files with their checksums, unless they were found right before and have not been touched since.

    Raises DataError naming the file and, where `regions` holds it, the bytes.
    """
    for name, wanted in sorted(sums.items()):
        path = folder / name
        about = path.stat()
        facts = [wanted, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
        stamp = cache / "checked" / f"{key}.json"
        with suppress(OSError, ValueError):
            if json.loads(stamp.read_text()) == facts:
                continue
        check_file(path, wanted, regions.get(name, ()), inspect)
        with suppress(OSError):  # a cache that cannot be written costs the next run another check
            stamp.parent.mkdir(parents=True, exist_ok=True)
            partial = stamp.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(facts))
            partial.rename(stamp)


def check_file(path: Path, wanted: str, regions: Sequence[str], inspect: Inspect = lambda *_: None) -> None:
    """Compare a file with its checksum. Raises DataError as `check_once`."""
    found, wrong, complaint = FileSum(), [], None
    try:
        with path.open("rb") as file:
            for number, data in enumerate(iter(lambda: file.read(REGION_BYTES), b"")):
                found.update(data)
                if number < len(regions) and f"{crc32(data):08x}" != regions[number]:
                    wrong.append(number)
                complaint = complaint or inspect(path.name, number * REGION_BYTES, data)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {REMEDY}") from error
    if found.sha256 != wanted:
        begin, more = (wrong[0] * REGION_BYTES, len(wrong) - 1) if wrong else (0, 0)
        where = f", bytes {begin} to {begin + REGION_BYTES - 1}" if wrong else ""
        others = f" and {more} more regions" if more else ""
        raise DataError(f"{path}: is damaged (its checksum is not the header's){where}{others}; {REMEDY}")
    if complaint is not None:
        raise DataError(f"{path}: {complaint}; {REMEDY}")
