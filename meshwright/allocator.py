"""glibc's malloc, told to keep what a step frees for the next step.

By default it maps every large tensor afresh and unmaps it when freed, so that each step pays a page fault for each 4
KiB of its activations: much of what a small model's CPU step loses. Kept memory stays with the process;
`memory.empty_cache_every` gives it back.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Numbers of mallopt(3)."""

_TOP_PAD_BYTES = 64 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Serve all sizes from the heap, grow it in large steps, and never shrink it. Linux with glibc only."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


def release_freed_memory() -> None:
    """Give the heap's free memory back to the system. Linux with glibc only."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc: others have neither call, and need neither."""
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:  # musl
        return None
