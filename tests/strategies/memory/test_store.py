"""Stores: zeros at first, values that are kept when memory is given back, and errors before the first step."""

from __future__ import annotations

import mmap
import re
import resource
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.memory.store import PAGE_ELEMENTS, DiskStore, HostStore
from tests.workers import run_ranks

CPU = torch.device("cpu")
MANY = 8 * 2**20


def resident_bytes(x: torch.Tensor) -> int:
    """Return the bytes in memory of the tensor's mapping, which has no other tensor's pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= x.data_ptr() < int(match[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the tensor")


def test_a_file_is_as_long_as_it_must_be_and_gone_when_it_is_mapped(tmp_path: Path) -> None:
    kept = DiskStore(1000, tmp_path / "offload-0.bin")
    assert kept.values.shape == (1000,)
    assert not kept.values.any()
    assert list(tmp_path.iterdir()) == []
    kept.values[:] = torch.arange(1000)
    assert kept.values[999] == 999


def touch_and_give_back(mesh: Mesh, path: Path) -> tuple[int, int, int, bool]:
    """Return the resident bytes of the file: all touched, half given back, all given back; and whether the values are
    kept."""
    kept = DiskStore(MANY, path)
    kept.values.copy_(torch.arange(MANY))
    touched = resident_bytes(kept.values)
    kept.give_back(0, MANY // 2)
    half = resident_bytes(kept.values)
    kept.give_back(mmap.PAGESIZE // 4 - 1, MANY)
    nothing = resident_bytes(kept.values)
    return touched, half, nothing, torch.equal(kept.values, torch.arange(MANY, dtype=torch.float32))


def test_given_back_pages_leave_and_come_again(tmp_path: Path) -> None:
    ((touched, half, nothing, there),) = run_ranks(touch_and_give_back, Grid((("data", 1),)), tmp_path / "f")
    assert touched >= 0.9 * 4 * MANY
    assert half <= 0.6 * 4 * MANY
    assert nothing <= 2**20
    assert there


def test_nothing_to_keep(tmp_path: Path) -> None:
    for kept in (HostStore(0, CPU, 0), DiskStore(0, tmp_path / "offload-0.bin")):
        kept.give_back(0, 0)
        assert kept.values.numel() == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "offload-0.bin"
    with pytest.raises(ConfigError) as caught:
        DiskStore(10, path)
    assert str(caught.value) == (
        f"memory.offload.to=disk cannot have 40 bytes in {path} (No such file or directory); "
        "valid: an --out folder with that much room, host"
    )


def too_large(mesh: Mesh, path: Path) -> str:
    """Limit the size of files, as a full disk does, and return the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    try:
        DiskStore(MANY, path)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "offload-0.bin"
    ((text),) = run_ranks(too_large, Grid((("data", 1),)), path, forked=True)
    assert text.startswith(f"memory.offload.to=disk cannot have {4 * MANY:,} bytes in {path} (File too large)")
    assert list(tmp_path.iterdir()) == []


def test_not_enough_host_memory() -> None:
    with pytest.raises(ConfigError) as caught:
        HostStore(10_000, CPU, 39_936)
    assert str(caught.value).startswith(
        "memory.offload.to=host needs 40,000 bytes of host memory on this rank, and 39,936 are available; valid: disk"
    )
    HostStore(9_984, CPU, 39_936)


class Runtime:
    """A runtime that pins and frees no memory, and records the address and bytes of each piece."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.pinned
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


ENDS = tuple(pages * PAGE_ELEMENTS for pages in (0, 2, 3, 7))
"""The first elements of three pieces, and the end of the last."""


def test_each_piece_is_pinned_by_itself_and_freed() -> None:
    runtime, gpu = Runtime(), torch.device("cuda", 0)
    stubs = {"cudart": lambda: runtime, "check_error": lambda code: None, "set_device": lambda device: None}
    with patch.multiple(torch.cuda, **stubs):
        # A piece may be empty: a state of no elements.
        kept = HostStore(ENDS[-1], gpu, 2**20, [ENDS[1], ENDS[0], ENDS[2], ENDS[2]])
        first = kept.values.data_ptr()
        assert runtime.pinned == {first + 4 * start: 4 * (stop - start) for start, stop in pairwise(ENDS)}
        assert not kept.values.any()
        del kept
    assert runtime.pinned == {}


def test_an_error_of_a_piece_is_raised() -> None:
    runtime = Runtime()

    def check(code: int) -> None:
        if len(runtime.pinned) > 1:
            raise RuntimeError("no more pinned memory")

    stubs = {"cudart": lambda: runtime, "check_error": check, "set_device": lambda device: None}
    with patch.multiple(torch.cuda, **stubs), pytest.raises(RuntimeError, match="no more pinned memory"):
        HostStore(ENDS[-1], torch.device("cuda", 0), 2**20, ENDS[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_copies_pieces_without_a_wait() -> None:
    kept = HostStore(ENDS[-1], torch.device("cuda", 0), 2**20, ENDS[:-1])
    for start, stop in pairwise(ENDS):
        piece = kept.values[start:stop]
        assert piece.is_pinned()
        there = torch.full((stop - start,), 1.5, device="cuda")
        piece.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((piece == 1.5).all())
        assert torch.equal(piece.to("cuda", non_blocking=True), there)
