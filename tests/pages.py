"""A worker's memory in huge pages, so that forks are cheap, and in one arena, so that the memory stays small.

A worker of the whole suite has 0.7 GB after collecting the tests. A fork copies an entry for each page of 4 KiB, and
the child's end drops the entry again: at 0.56 GB 90 ms of processor time, at pages of 2 MiB 15 (Linux 6.18, a loop of
forks). Hundreds of tests fork their ranks once each.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HUGE_BYTES = 2 * 2**20
HUGE_PAGES, COLLAPSE = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE, of Linux 6.1 and newer
ARENA_MAX = -8  # mallopt(3)'s M_ARENA_MAX


def own_memory() -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of this process's private memory without a file, cut to whole huge pages."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place = re.match(r"(\w+)-(\w+) rw-p \w+ 00:00 0 *(\[heap\])?$", line)
        if place is not None:
            start, end = (int(bound, 16) for bound in place.groups()[:2])
            start, end = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
            if start < end:
                yield start, end


def collapse_memory() -> None:
    """Move this process's memory into huge pages; if the kernel refuses, forks stay slow."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in list(own_memory()):
        advise(start, end - start, HUGE_PAGES)
        advise(start, end - start, COLLAPSE)


def use_one_arena() -> None:
    """Let threads allocate from one heap. Ranks are threads, and only one runs at a time.

    glibc gives each thread a heap, and a heap keeps freed memory.
    """
    if hasattr(library := ctypes.CDLL(None), "mallopt"):  # glibc alone
        library.mallopt(ARENA_MAX, 1)
