"""The allocators behind torch's tensors, as bookkeeping: what they would have asked the device or the system for.

On a GPU c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments, no largest split):

| a request of, in multiples of 512 bytes | pool  | a new segment has                |
|-----------------------------------------|-------|----------------------------------|
| up to 1 MiB                             | small | 2 MiB                            |
| less than 10 MiB                        | large | 20 MiB                           |
| more                                    | large | the request in multiples of 2 MiB |

A request takes the smallest free block of its pool that is large enough, of equal ones the first, and gives the rest of
it back where that is at least 512 bytes of the small or more than 1 MiB of the large pool. A freed block is joined with
free neighbours of its segment. Segments stay; where the device has no room for another one, all that are free as a
whole are given back before the request is refused.

Everything is on one stream. What comms send stays alive until it is waited for, so no block comes back later than its
tensor goes.

On a CPU glibc's heap, which a rank lets serve all sizes and never shrink (machine.keep_freed_memory): the smallest free
piece that is large enough, or more of the heap; what was ever touched stays resident.
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
"""Tensors on a CPU begin at multiples of it (c10/core/alignment.h); glibc keeps a header of its own before each."""
HEAP_HEADER = 16


class OutOfDeviceMemory(Exception):
    """The device has no room for a segment, not even when all cached ones are given back."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment. `before`, `after`: its neighbours in there."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    before: MemoryBlock | None = field(default=None, repr=False)
    after: MemoryBlock | None = field(default=None, repr=False)


class Allocator:
    """Free blocks by size, and their joining; subclasses say where new memory comes from. `allocated`: bytes in use;
    `reserved`: bytes that the process has, at its most `peak_reserved`."""

    def __init__(self) -> None:
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """(size, address) of each free block, by whether its pool is the small one; in order."""
        self._at: dict[int, MemoryBlock] = {}
        self._end = 0
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0

    def allocate(self, size: int) -> MemoryBlock:
        """Raises OutOfDeviceMemory where there is no room."""
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
        """The first part of a block that is not among the free ones; the rest is, if it is so large."""
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
        """The best fit among free blocks."""
        free = self._free[is_small]
        # Sorted by (size, address): the first that is large enough is the best fit at the lowest address.
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        return self._at.pop(free.pop(index)[1])

    def _joined(self, first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _give(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.size, block.address))
        self._at[block.address] = block

    def _take(self, block: MemoryBlock) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]
        del self._at[block.address]


class CachingAllocator(Allocator):
    """A GPU's. `limit_bytes`: the device's room for segments; None: any."""

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
            # As torch does before it refuses: segments of which no block is in use go back to the device.
            for free in self._free.values():
                for _, address in list(free):
                    block = self._at[address]
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
    """A CPU's. `reserved`: bytes up to the highest address that was ever in use."""

    _last: MemoryBlock | None = None

    def allocate(self, size: int) -> MemoryBlock:
        rounded = -(-(size + HEAP_HEADER) // ALIGNMENT) * ALIGNMENT
        block = self._cached(rounded, is_small=False)
        if block is None:  # the last one is in use: a free one has become a part of what lies beyond (`_give`)
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
        # A free piece at the end of the heap is one with what lies beyond, so it is no piece at all.
        self._end, self._last = block.address, block.before
        if self._last is not None:
            self._last.after = None
