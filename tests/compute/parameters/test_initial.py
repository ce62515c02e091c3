"""Initial values: the same bits for any number of threads and on any device, and few blocks on the host at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.compute.parameters import initial as initial_file
from meshwright.compute.parameters.initial import draw_values, first_values
from meshwright.compute.parameters.shard import Box, Initial, Shard, ShardSpec, seed_of
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.ranks.transport import Transport

CPU = torch.device("cpu")
SPEC = ShardSpec((100, 24), {"data": Shard(1)}, Initial(0.5, mean=2.0))
ROWS = 7
"""Rows of a block; the last block is shorter."""


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with patch.object(initial_file, "BLOCK_ELEMENTS", ROWS * 24 + 1):
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_hand(name: str, seed: int) -> Tensor:
    """Draw one block after another, each from a generator seeded by the block's number."""
    blocks = []
    for number, first in enumerate(range(0, 100, ROWS)):
        generator = torch.Generator().manual_seed(seed_of(f"{seed}/{name}/{number}"))
        blocks.append(torch.empty(min(ROWS, 100 - first), 24).normal_(2.0, 0.5, generator=generator))
    return torch.cat(blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_threads_change_no_bit(count: int, dtype: torch.dtype) -> None:
    wanted = by_hand("w", 3)
    with threads(count):
        assert torch.equal(first_values("w", SPEC, 3), wanted)
        for rank in range(2):
            mesh = Mesh(Grid((("data", 2),)), rank, CPU, Transport())
            out = torch.empty(100, 12, dtype=dtype)
            draw_values(out, "w", SPEC, mesh, 3)
            assert torch.equal(out, wanted[:, 12 * rank : 12 * rank + 12].to(dtype))


@pytest.mark.parametrize("count", [2, 4])
def test_few_blocks_are_ahead(count: int) -> None:
    """At most a block for each thread and one more are drawn ahead."""
    drawn = 0

    def counted(label: str) -> int:
        nonlocal drawn
        drawn += 1
        return seed_of(label)

    whole = Box((0, 0), SPEC.shape)
    assert SPEC.initial is not None
    with threads(count), patch.object(initial_file, "seed_of", counted):
        for taken, _ in enumerate(initial_file._blocks(SPEC.shape, SPEC.initial, whole, "3/w")):
            assert drawn <= taken + count + 1
    assert drawn == -(-100 // ROWS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_bits_of_a_cpu(dtype: torch.dtype) -> None:
    spec = ShardSpec(SPEC.shape, initial=SPEC.initial)
    with threads(3):
        out = torch.empty(spec.shape, dtype=dtype, device="cuda")
        draw_values(out, "w", spec, solo_mesh(out.device), 3)
    assert torch.equal(out.cpu(), by_hand("w", 3).to(dtype))
