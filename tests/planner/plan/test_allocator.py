"""The model of torch's caching allocator follows c10/cuda/CUDACachingAllocator.cpp and the rules of every allocator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.plan.allocator import Allocator, CachingAllocator, Heap, MemoryBlock, OutOfDeviceMemory

MIB = 2**20


@pytest.mark.parametrize(
    "request_bytes, block_bytes, segment_bytes",
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not worth a block of the large pool
        (10 * MIB + 512, 12 * MIB - (2 * MIB - 512), 12 * MIB),  # a larger rest is
    ],
)
def test_sizes(request_bytes: int, block_bytes: int, segment_bytes: int) -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(request_bytes).size == block_bytes
    assert (allocator.allocated, allocator.reserved) == (block_bytes, segment_bytes)


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.allocate(512)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved == 4 * MIB


def test_segments_stay_and_best_fit() -> None:
    """The smaller of two free blocks is taken first; free neighbours are joined; freed memory stays reserved."""
    allocator = CachingAllocator()
    first, second = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert (allocator.allocated, allocator.reserved) == (0, 70 * MIB)
    assert allocator.allocate(28 * MIB).address == second.address
    parts = [allocator.allocate(20 * MIB) for _ in range(2)]
    assert [part.address for part in parts] == [first.address, first.address + 20 * MIB]
    allocator.free(parts[0])
    allocator.free(parts[1])
    assert allocator.allocate(40 * MIB).address == first.address
    assert allocator.reserved == 70 * MIB


def test_fragments_hold_memory() -> None:
    """Free pieces serve no larger request: 30 MiB fit in neither of two free pieces of 20 MiB around a used piece."""
    whole = CachingAllocator()
    whole.free(whole.allocate(60 * MIB))
    parts = [whole.allocate(20 * MIB) for _ in range(3)]
    whole.free(parts[0])
    whole.free(parts[2])
    whole.allocate(30 * MIB)
    assert (whole.reserved, whole.allocated) == (90 * MIB, 50 * MIB)


def test_cached_segments_are_given_back_for_others() -> None:
    """At the limit a wholly free segment is given back; a segment with a used block is not."""
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (80 * MIB, 80 * MIB)

    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(20 * MIB)
    with pytest.raises(OutOfDeviceMemory, match="beside"):
        allocator.allocate(80 * MIB)


def test_heap_grows_where_nothing_fits() -> None:
    """Freed pieces serve again; free memory at the end serves a larger request; touched memory stays reserved."""
    heap = Heap()
    first, second, third = (heap.allocate(4 * MIB) for _ in range(3))
    grown = heap.reserved
    assert 12 * MIB < grown < 12 * MIB + 1024
    heap.free(first)
    assert heap.allocate(3 * MIB).address == first.address
    heap.free(second)
    heap.free(third)
    assert heap.allocate(11 * MIB).address < second.address, "the first one's rest, what was freed, and more"
    assert heap.reserved > grown


@pytest.mark.parametrize("make", [CachingAllocator, lambda: CachingAllocator(256 * MIB), Heap])
@given(requests=st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 7)), max_size=60))
def test_any_order(make: Callable[[], Allocator], requests: list[tuple[int, int]]) -> None:
    """Blocks never overlap, have the requested size and are freed; allocated memory never exceeds reserved memory."""
    allocator = make()
    live: list[MemoryBlock] = []
    for size, freed in requests:
        try:
            live.append(allocator.allocate(size))
        except OutOfDeviceMemory:
            continue
        assert live[-1].size >= size
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(block.size for block in live) == allocator.allocated <= allocator.reserved
        for _ in range(min(freed // 3, len(live))):
            allocator.free(live.pop(freed % len(live)))
    reserved = allocator.reserved
    for block in live:
        allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, reserved)
    if isinstance(allocator, Heap):
        assert allocator.allocate(reserved // 2).address == 0
    elif reserved:
        allocator.free(allocator.allocate(MIB))
        free = sum(size for pool in allocator._free.values() for size, *_ in pool)
        assert free == allocator.reserved, "every segment is whole again"
