"""Stores: float32 memory for offloaded states, in pinned host memory or in a memory-mapped file.

| offload.to | where                               | resident memory of the process                     |
|------------|-------------------------------------|----------------------------------------------------|
| host       | memory; pinned if there is a GPU    | a GPU: all of it, at once; else as it is written   |
| disk       | a file, mapped                      | pages touched and not given back by `give_back`    |

A file is unlinked as soon as it is mapped: the file system frees the blocks however the run ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.errors import ConfigError

PAGE_ELEMENTS = mmap.PAGESIZE // 4
ELEMENT_BYTES = 4


class Store:
    """A flat tensor `values` [n] of float32, zeros at first."""

    values: Tensor
    _map: mmap.mmap | None = None
    """The mapped file of the values; None: host memory."""

    def give_back(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of elements start..stop, or of all, if not needed for a while.

        The pages leave the process's memory, and the system writes them to the file later. Does nothing in host memory.
        """
        if self._map is None:
            return
        # madvise must begin on a page.
        first = start * ELEMENT_BYTES // mmap.PAGESIZE * mmap.PAGESIZE
        length = (self.values.numel() if stop is None else stop) * ELEMENT_BYTES - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


class HostStore(Store):
    """Host memory, pinned for a GPU. Raises ConfigError if more is needed than is `available` to this rank.

    Args:
        num_elements: of all pieces.
        device: a GPU needs pinned memory.
        available: bytes of host memory.
        starts: the first element of each piece, each on a page. A piece is pinned by itself: no copy between host and
            device may cross an end of a piece.
    """

    def __init__(self, num_elements: int, device: torch.device, available: int, starts: Sequence[int] = (0,)) -> None:
        needed = num_elements * ELEMENT_BYTES
        if needed > available:
            rule = f"needs {needed:,} bytes of host memory on this rank, and {available:,} are available"
            raise ConfigError.of("memory.offload.to", "host", rule, "disk, a smaller model, more ranks with sync=zero1")
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(ELEMENT_BYTES, needed), flags=private)
        if device.type == "cuda":
            memory.madvise(mmap.MADV_HUGEPAGE)  # pages of 2 MiB are made and pinned several times as fast
        self.values = _floats(memory, num_elements)
        if device.type == "cuda":
            _pin(self.values, starts, device)


def _floats(memory: mmap.mmap, num_elements: int) -> Tensor:
    """View a mapping of at least one element as float32 [n]."""
    return torch.frombuffer(memory, dtype=torch.float32, count=max(1, num_elements))[:num_elements]


def _pin(values: Tensor, starts: Sequence[int], device: torch.device) -> None:
    """Pin each piece in place: torch's own pinned allocator would round the size up to a power of two."""
    # All threads make pages; registering memory without pages would make the pages in one thread.
    values[::PAGE_ELEMENTS].zero_()
    runtime, address = torch.cuda.cudart(), values.data_ptr()

    def register(start: int, stop: int) -> None:
        first = address + start * ELEMENT_BYTES
        torch.cuda.check_error(runtime.cudaHostRegister(first, (stop - start) * ELEMENT_BYTES, 0))
        weakref.finalize(values, runtime.cudaHostUnregister, first)

    # A new thread's device is the first one.
    with ThreadPoolExecutor(torch.get_num_threads(), "pin", torch.cuda.set_device, (device,)) as threads:
        ends = pairwise((*sorted(starts), values.numel()))
        pinned = [threads.submit(register, start, stop) for start, stop in ends if start < stop]
    for piece in pinned:
        piece.result()  # raises the piece's error


class DiskStore(Store):
    """A mapped file. Raises ConfigError if the file cannot be written, or the disk has not enough room."""

    def __init__(self, num_elements: int, path: Path) -> None:
        # A file of no bytes cannot be mapped, and a rank may own nothing.
        size_bytes = max(1, num_elements) * ELEMENT_BYTES
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                _reserve(descriptor, size_bytes)
                self._map = mmap.mmap(descriptor, size_bytes)
            finally:
                # The mapping keeps the file alive; without a name nothing is left over, however the run is killed.
                path.unlink()
                os.close(descriptor)
        except OSError as error:
            rule = f"cannot have {size_bytes:,} bytes in {path} ({error.strerror})"
            instead = "an --out folder with that much room, host"
            raise ConfigError.of("memory.offload.to", "disk", rule, instead) from error
        self.values = _floats(self._map, num_elements)


def _reserve(descriptor: int, size_bytes: int, system: Any = os) -> None:
    """Allocate the file's blocks now: a full disk fails here, not in the middle of a step."""
    try:
        system.posix_fallocate(descriptor, 0, size_bytes)
    except AttributeError:  # macOS has no such call: the room is checked, not reserved
        facts = os.fstatvfs(descriptor)
        if facts.f_bavail * facts.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        os.ftruncate(descriptor, size_bytes)
