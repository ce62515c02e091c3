"""The allocators of torch's tensors, as bookkeeping: the memory that they would request from the device or the system.

On a GPU c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments, no largest split):

| a request of, in multiples of 512 bytes | pool  | a new segment has                |
|-----------------------------------------|-------|----------------------------------|
| up to 1 MiB                             | small | 2 MiB                            |
| less than 10 MiB                        | large | 20 MiB                           |
| more                                    | large | the request in multiples of 2 MiB |

A request takes the smallest free block of its pool that is large enough, among equal blocks the first. The rest of the
block is split off if it has at least 512 bytes in the small pool, or more than 1 MiB in the large pool. A freed block
is joined with free neighbours of its segment. Segments are kept. If the device has no room for another segment, all
wholly free segments are returned to the device before the request is refused.

All kernels use one stream. A tensor that a comm sends stays allocated until the wait, so a block is freed with its
tensor.

On a CPU glibc's heap, set to serve all sizes and never shrink (machine.keep_freed_memory): a request takes the smallest
free piece that is large enough, or extends the heap. Touched memory stays resident.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_OWN_SEGMENT = 10 * 2**20
OWN_SEGMENT_ROUNDED_TO = 2 * 2**20
"""kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and kRoundLarge."""

ALIGNMENT = 64
"""Tensors on a CPU begin at multiples of this (c10/core/alignment.h); glibc stores a header before each."""
HEAP_HEADER = 16


class OutOfDeviceMemory(Exception):
    """The device has no room for a segment, even with all cached segments returned."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment. `before`, `after`: the neighbours in the segment."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    before: MemoryBlock | None = field(default=None, repr=False)
    after: MemoryBlock | None = field(default=None, repr=False)


class Allocator:
    """Free blocks by size, and the joining of neighbours; subclasses get new memory. `allocated`: bytes in use;
    `reserved`: bytes held by the process, `peak_reserved` at most."""

    def __init__(self) -> None:
        self._free: dict[bool, list[tuple[int, int, MemoryBlock]]] = {True: [], False: []}
        """(size, address, block) of each free block, ascending, by whether its pool is the small one."""
        self._end = 0
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0

    def allocate(self, size: int) -> MemoryBlock:
        """Allocate a block. Raises OutOfDeviceMemory if there is no room."""
        raise NotImplementedError

    def free(self, block: MemoryBlock) -> None:
        assert not block.is_free, f"freed twice: {block}"
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._take(before)
            block = self._joined(before, block)
        if after is not None and after.is_free:
            self._take(after)
            block = self._joined(block, after)
        self._give(block)

    def _used(self, block: MemoryBlock, size: int, least_rest: int) -> MemoryBlock:
        """Mark the first `size` bytes of a block as used. The rest becomes a free block if it has at least `least_rest`
        bytes."""
        if block.size - size >= least_rest:
            rest = MemoryBlock(block.address + size, block.size - size, block.is_small, True, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._give(rest)
        block.is_free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return block

    def _cached(self, size: int, is_small: bool) -> MemoryBlock | None:
        """Take the best fit from the free blocks; None if all are smaller."""
        free = self._free[is_small]
        # Sorted by (size, address): the first large enough block is the best fit at the lowest address.
        index = bisect_left(free, (size,))
        return free.pop(index)[2] if index < len(free) else None

    def _joined(self, first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _give(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.address, block))

    def _take(self, block: MemoryBlock) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]


class CachingAllocator(Allocator):
    """The allocator of a GPU. `limit_bytes`: the device's room for segments; None: unlimited."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self._limit = limit_bytes

    def allocate(self, size: int) -> MemoryBlock:
        rounded = -(-size // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK
        is_small = rounded <= SMALL_SIZE
        block = self._cached(rounded, is_small) or self._segment(rounded, is_small)
        return self._used(block, rounded, MIN_BLOCK if is_small else SMALL_SIZE + 1)

    def _segment(self, size: int, is_small: bool) -> MemoryBlock:
        if is_small:
            whole = SMALL_SEGMENT
        elif size < MIN_OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // OWN_SEGMENT_ROUNDED_TO) * OWN_SEGMENT_ROUNDED_TO
        if self._limit is not None and self.reserved + whole > self._limit:
            # As in torch, wholly free segments are returned to the device before the request is refused.
            for free in self._free.values():
                for _, _, block in list(free):
                    if block.before is None and block.after is None:
                        self._take(block)
                        self.reserved -= block.size
            if self.reserved + whole > self._limit:
                raise OutOfDeviceMemory(f"{whole} bytes beside {self.reserved} of {self._limit}")
        self.reserved += whole
        block = MemoryBlock(self._end, whole, is_small)
        self._end += whole
        return block


class Heap(Allocator):
    """The heap of a CPU process. `reserved`: bytes up to the highest address ever used."""

    _last: MemoryBlock | None = None

    def allocate(self, size: int) -> MemoryBlock:
        rounded = -(-(size + HEAP_HEADER) // ALIGNMENT) * ALIGNMENT
        block = self._cached(rounded, is_small=False)
        if block is None:  # the last block is in use: free ones at the end are cut off (`_give`)
            block = MemoryBlock(self._end, rounded, is_small=False, before=self._last)
            if self._last is not None:
                self._last.after = block
            self._last = block
            self._end += rounded
            self.reserved = max(self.reserved, self._end)
        assert block is not self._last or block.size == rounded, "the last block has the size that was asked for"
        return self._used(block, rounded, ALIGNMENT)

    def _give(self, block: MemoryBlock) -> None:
        if block.after is not None:
            super()._give(block)
            return
        block.is_free = True
        # A free piece at the end of the heap joins the unused memory after the heap.
        self._end, self._last = block.address, block.before
        if self._last is not None:
            self._last.after = None
