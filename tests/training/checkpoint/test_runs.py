"""A manifest grows with the parameters, not with the ranks. A reader hashes the blocks that are read, and no other
block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.compute.parameters.root import BLOCK_BYTES
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.errors import DamagedError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.training.checkpoint import Checkpoint, pieces_of, restore
from meshwright.training.checkpoint.manifest import Manifest, Origin, Progress, StoredRun
from meshwright.training.checkpoint.shard import Stored, StoredShard, write_shard
from meshwright.training.checkpoint.writer import runs_of
from tests.harness import build
from tests.oracle.data_parallel import config_for
from tests.training.checkpoint.states import run_leg
from tests.workers import run_ranks


def listed(ranks: int, rank: int) -> tuple[Any, tuple[StoredRun, ...]]:
    """Return the groups and runs that a rank of a planned zero1 lists."""
    config = config_for("zero1", ranks)
    parts = build(config, planned_mesh(Grid(config.layout.axes), rank, config.layout.token_axes))
    parts.optimizer.prepare_states(1)
    return runs_of(pieces_of(parts), parts.mesh)


def test_a_manifest_does_not_grow_with_the_ranks() -> None:
    runs = {ranks: listed(ranks, 0)[1] for ranks in (2, 12)}
    assert len(runs[2]) == len(runs[12]) > 0
    assert listed(12, 0)[0] == (tuple(range(12)),)
    for rank in (1, 5, 11):
        assert listed(12, rank) == ((), ()), "rank 0 reads what every rank lists"


SHAPE = (7, 5, 3)


@pytest.fixture
def sliced(tmp_path: Path) -> Checkpoint:
    """Return a tensor that begins at element 4 of flat memory, in 10 slices of 12 elements."""
    whole = torch.arange(105.0)
    files = []
    for rank in range(10):
        begin, end = max(0, 12 * rank - 4), min(105, 12 * rank + 8)
        held = Stored("weight/w", "weight of w", SHAPE, Box((0, 0, 0), SHAPE), whole[begin:end].clone(), begin)
        files.append(write_shard(tmp_path / f"rank-{rank}.safetensors", [held] if begin < end else [])[0])
    run = StoredRun("w", "weight", SHAPE, (0, 0, 0), SHAPE, "float32", "weight/w", group=0, start=4, length=12)
    Manifest(Progress(), Origin({}), tuple(files), (tuple(range(10)),), (run,)).write(tmp_path)
    return Checkpoint(tmp_path)


def test_any_box_of_slices_is_read_from_the_files_that_hold_it(sliced: Checkpoint) -> None:
    whole = torch.arange(105.0).view(SHAPE)
    sides = [[(start, stop) for start in range(size) for stop in range(start + 1, size + 1)] for size in SHAPE]
    for sides_of_box in itertools.product(*sides):
        box = Box(tuple(start for start, _ in sides_of_box), tuple(stop - start for start, stop in sides_of_box))
        assert torch.equal(sliced.read("w", "weight", box), whole[box.slices])
    fresh = Checkpoint(sliced.folder)
    fresh.read("w", "weight", Box((1, 0, 0), (2, 5, 3)))  # elements 15 to 44: elements 19 to 48 of flat memory
    assert list(fresh.shards) == [f"rank-{rank}.safetensors" for rank in (1, 2, 3, 4)]


def test_only_blocks_that_are_read_are_hashed(tmp_path: Path) -> None:
    length = BLOCK_BYTES // 4
    values = torch.arange(3.0 * length + 5)
    parts = [
        Stored(f"weight/{name}", f"weight of {name}", (size,), Box((0,), (size,)), values[:size].clone())
        for name, size in (("w", values.numel()), ("v", 9))
    ]
    file, _ = write_shard(tmp_path / "rank-0.safetensors", parts)
    path = tmp_path / file.file
    content = bytearray(path.read_bytes())
    content[-4 * length - 20] ^= 1  # in the third of four blocks of the last tensor
    path.write_bytes(content)
    runs = [
        StoredRun(name, "weight", (size,), (0,), (size,), "float32", f"weight/{name}", group=0, start=0, length=size)
        for name, size in (("w", values.numel()), ("v", 9))
    ]
    run, shard = runs[0], StoredShard(path, file, [(run, 0) for run in runs])

    def read(begin: int, end: int) -> list[float]:
        pieces = list(shard.elements(run, 0, begin, end))
        return torch.cat([part for _, part in pieces])[begin - pieces[0][0] : end - pieces[0][0]].tolist()

    assert read(10, 2 * length) == values[10 : 2 * length].tolist()
    assert read(3 * length, 3 * length + 5) == values[3 * length :].tolist()
    for begin, end in ((2 * length, 2 * length + 1), (0, values.numel()), (3 * length - 1, 3 * length + 1)):
        with pytest.raises(DamagedError, match="are not those that were written"):
            read(begin, end)
    with pytest.raises(DamagedError, match="are not those that were written"):
        shard.check()


def touched(mesh: Mesh, config: Any, folder: Path) -> list[tuple[str, int]]:
    """Return the bytes of shards that this rank checks when a checkpoint is restored: `file, -1` for a header."""
    seen: list[tuple[str, int]] = []
    opened, read = StoredShard.__init__, StoredShard._read

    def opening(shard: StoredShard, path: Path, *others: Any) -> None:
        seen.append((path.name, -1))
        opened(shard, path, *others)

    def reading(shard: StoredShard, *place: Any) -> Iterator[tuple[int, bytearray]]:
        for position, content in read(shard, *place):
            start = shard._data + place[1] + position
            seen.extend((shard.path.name, byte) for byte in range(start, start + len(content)))
            yield position, content

    with patch.object(StoredShard, "__init__", opening), patch.object(StoredShard, "_read", reading):
        restore(build(config, mesh), Checkpoint(folder))
    return seen


@pytest.mark.few(1)
@pytest.mark.parametrize("sync, ranks", [("allreduce", 2), ("zero1", 3)])
def test_a_resume_checks_every_byte_of_every_shard(sync: str, ranks: int, tmp_path: Path) -> None:
    """A replica's shard without tensors is checked as well: a flipped bit of the header is reported as damage."""
    run_ranks(run_leg, Grid((("data", ranks),)), config_for(sync, ranks), None, tmp_path, 0, 1)
    folder = tmp_path / "step-1"
    for readers in (2, 1):
        seen = set().union(*run_ranks(touched, Grid((("data", readers),)), config_for("zero1", readers), folder))
        for file in Checkpoint(folder).manifest.files:
            if file.header_bytes is not None:
                tensors = range(file.header_bytes, file.size_bytes)
                assert {(file.file, byte) for byte in (-1, *tensors)} <= seen
