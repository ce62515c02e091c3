"""Stores: one flat run of float32 in pinned host memory, or in a memory-mapped file.

| offload.to | where                               | resident memory of the process                     |
|------------|-------------------------------------|----------------------------------------------------|
| host       | memory; pinned where there is a GPU | all of it                                          |
| disk       | a file, mapped                      | what was touched and not given back by `give_back` |

A file has its name only for as long as it takes to map it: the file system takes the room back however the run ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.errors import ConfigError

PAGE_ELEMENTS = mmap.PAGESIZE // 4
ELEMENT_BYTES = 4


class Store:
    """`values` [n] float32, zeros at first."""

    values: Tensor
    _map: mmap.mmap | None = None
    """The mapped file in which they are; None: host memory."""

    def give_back(self, start: int = 0, stop: int | None = None) -> None:
        """The process will not need the elements start..stop, or all, for a while: their pages leave it, and the system
        writes them to the file when it likes. Nothing to do in host memory."""
        if self._map is None:
            return
        # madvise wants to begin on a page.
        first = start * ELEMENT_BYTES // mmap.PAGESIZE * mmap.PAGESIZE
        length = (self.values.numel() if stop is None else stop) * ELEMENT_BYTES - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


class HostStore(Store):
    """Host memory, pinned for a GPU. Raises ConfigError where it is more than what is `available` to this rank."""

    def __init__(self, num_elements: int, device: torch.device, available: int) -> None:
        needed = num_elements * ELEMENT_BYTES
        if needed > available:
            rule = f"needs {needed:,} bytes of host memory on this rank, and {available:,} are available"
            raise ConfigError.of("memory.offload.to", "host", rule, "disk, a smaller model, more ranks with sync=zero1")
        self.values = torch.zeros(num_elements)
        if device.type == "cuda" and num_elements:
            # Pinned where it lies: torch's own pinned allocator would round its size up to a power of two.
            runtime, values = torch.cuda.cudart(), self.values
            torch.cuda.check_error(runtime.cudaHostRegister(values.data_ptr(), needed, 0))
            weakref.finalize(values, runtime.cudaHostUnregister, values.data_ptr())


class DiskStore(Store):
    """A mapped file. Raises ConfigError where it cannot be written, or the disk has no room for all of it."""

    def __init__(self, num_elements: int, path: Path) -> None:
        # A file of no bytes cannot be mapped, and a rank may own nothing.
        size_bytes = max(1, num_elements) * ELEMENT_BYTES
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                _reserve(descriptor, size_bytes)
                self._map = mmap.mmap(descriptor, size_bytes)
            finally:
                # The mapping keeps the file alive; without a name nothing is left behind, however the run is killed.
                path.unlink()
                os.close(descriptor)
        except OSError as error:
            rule = f"cannot have {size_bytes:,} bytes in {path} ({error.strerror})"
            instead = "an --out folder with that much room, host"
            raise ConfigError.of("memory.offload.to", "disk", rule, instead) from error
        self.values = torch.frombuffer(self._map, dtype=torch.float32, count=max(1, num_elements))[:num_elements]


def _reserve(descriptor: int, size_bytes: int, system: Any = os) -> None:
    """Give the file its blocks now: a full disk is found out here, and not in the middle of a step."""
    try:
        system.posix_fallocate(descriptor, 0, size_bytes)
    except AttributeError:  # macOS has no such call: room is asked for, and not taken
        facts = os.fstatvfs(descriptor)
        if facts.f_bavail * facts.f_frsize < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        os.ftruncate(descriptor, size_bytes)
