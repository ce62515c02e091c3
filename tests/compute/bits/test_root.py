"""Roots, and the first difference of two runs."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compute.parameters import root
from meshwright.compute.parameters.root import (
    block_bounds,
    comparable,
    elements_hashes,
    order_root,
    root_text,
    row_hashes,
)
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.machine import find_mpiexec
from meshwright.tools.diff import difference
from meshwright.training.checkpoint.manifest import read_manifest
from meshwright.training.checkpoint.reader import steps_in
from tests.training.runs import config_for, lines_of, make_corpus, run

SHAPE = (6, 10)
SHAPES = [(6, 10), (40,), (9000,), (3, 5000), (2, 3, 300), (700, 2), (5, 3, 2), (4, 20_000)]
"""Rows of one dim and of several, shorter than a word and longer than a segment."""


def box_hash(name: str, shape: tuple[int, ...], box: Box, values: torch.Tensor) -> int:
    return int(row_hashes(name, shape, box, values).sum())


def halves(shape: tuple[int, ...], dim: int) -> list[Box]:
    """A tensor, cut in two uneven parts along a dim."""
    cut = max(1, shape[dim] // 3)
    places = [(0, cut), (cut, shape[dim] - cut)]
    return [
        Box(
            tuple(start if axis == dim else 0 for axis in range(len(shape))),
            tuple(length if axis == dim else size for axis, size in enumerate(shape)),
        )
        for start, length in places
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = int(box_hash("weight of a", shape, Box((0,) * len(shape), shape), x.flatten()))
    for dim in range(len(shape)):
        parts = [int(box_hash("weight of a", shape, box, x[box.slices].flatten())) for box in halves(shape, dim)]
        assert (sum(parts) - whole) % 2**64 == 0, f"cut along dim {dim}"


@pytest.mark.parametrize("most", [1, 2**20])
def test_boxes_with_gaps_in_a_row_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Rows of two dims are cut along both dims and along the first."""
    monkeypatch.setattr(root, "GAPPED_ELEMENTS", most)
    shape = (6, 40, 100)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = box_hash("a", shape, Box((0, 0, 0), shape), x.flatten())
    boxes = [Box((2 * a, 0, 30 * c), (2, 40, (30, 70)[c])) for a in range(3) for c in (0, 1)]
    assert (sum(box_hash("a", shape, box, x[box.slices].flatten()) for box in boxes) - whole) % 2**64 == 0
    corners = [Box((0, 11 * b, 30 * c), (6, (11, 29)[b], (30, 70)[c])) for b in (0, 1) for c in (0, 1)]
    assert (sum(box_hash("a", shape, box, x[box.slices].flatten()) for box in corners) - whole) % 2**64 == 0


@pytest.mark.parametrize("chunk", [1, 48, 2**17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_of_flat_memory_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], chunk: int
) -> None:
    monkeypatch.setattr(root, "CHUNK_WORDS", {"cpu": chunk})
    box = halves(shape, len(shape) - 1)[1]
    x = torch.randn(box.num_elements, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole, end = int(box_hash("a", shape, box, x)), x.numel()
    for cuts in ([0, end], [0, 5, end], [0, 1, 3, end // 2, end - 1, end]):
        slices = [int(elements_hashes("a", shape, box, start, x[start:stop]).sum()) for start, stop in pairwise(cuts)]
        assert (sum(slices) - whole) % 2**64 == 0


def test_a_segment_s_sums_are_exact() -> None:
    """float64 holds the sums of the largest possible words and keys."""
    keys, _ = root.factors(torch.device("cpu"))
    assert keys.abs().max() <= 2**9
    assert 2**31 * 2**9 * root.SEGMENT < 2**53
    words = torch.full((1, root.SEGMENT), -(2**31), dtype=torch.int32)
    sums = torch.mm(words.double(), keys)
    assert sums.long().tolist() == [[-(2**31) * int(column) for column in keys.long().sum(0)]]


def test_blocks_have_whole_rows_and_cover_a_slice() -> None:
    box = Box((0, 0), (5000, 768))
    bounds = block_bounds((5000, 768), box, 1000, 10**6, 4)
    assert (bounds[0], bounds[-1]) == (0, 10**6)
    assert all((bound + 1000) % 768 == 0 for bound in bounds[1:-1])
    assert all(0 < stop - start <= root.BLOCK_BYTES // 4 for start, stop in pairwise(bounds))
    long = block_bounds((3, 10**6), Box((0, 0), (3, 10**6)), 0, 3 * 10**6, 2)
    assert {stop - start for start, stop in pairwise(long[:-1])} == {root.BLOCK_BYTES // 2}
    assert block_bounds((7,), Box((0,), (7,)), 3, 0, 4) == [0]


def test_roots_of_two_versions_are_not_compared() -> None:
    assert comparable(root_text([1]), root_text([2]))
    assert comparable("0123456789abcdef", "0" * 16)
    assert not comparable("0123456789abcdef", root_text([1]))
    assert not comparable(root_text([1]), None)


def test_another_order_of_data_has_another_root(corpus: Path, two_ranks: Path) -> None:
    other = run_of(corpus, "seed", seed=2)
    parts = difference(two_ranks, other).parts
    assert parts[0].tensor == "the order of data"
    sample = {"tokens": torch.arange(4)}
    roots = {order_root("ab", 1, 8, sample), order_root("ab", 1, 8, {"tokens": torch.arange(1, 5)})}
    roots |= {order_root("ab", 2, 8, sample), order_root("ab", 1, 9, sample), order_root("ac", 1, 8, sample)}
    assert len(roots) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bit_a_place_and_a_name_change_it(dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype).flatten()
    box = Box((0, 0), SHAPE)
    known = int(box_hash("a", SHAPE, box, x))
    flipped = x.clone()
    flipped.view(torch.int16)[7] ^= 1
    swapped = x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    others = {int(box_hash("a", SHAPE, box, flipped)), int(box_hash("a", SHAPE, box, swapped))}
    rows = x.view(SHAPE)[[1, 0, 2, 3, 4, 5]].flatten()
    signs = x.clone()
    signs[[1, 3]] *= -1  # the highest bits of two words alone
    others |= {int(box_hash("b", SHAPE, box, x)), int(box_hash("a", SHAPE, box, -x))}
    others |= {int(box_hash("a", SHAPE, box, rows)), int(box_hash("a", SHAPE, box, signs))}
    assert len(others | {known}) == 7
    assert root_text([known]) != root_text([known, 1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("runs"))


def run_of(corpus: Path, name: str, *, resume: bool = False, **changes: Any) -> Path:
    """Run six steps with layout-free bits, with ranks as threads."""
    tree = {"precision": "float32", "bits": "layout-free", "check": {"root_every": 2}, "steps": 6}
    layout = {"transport": "threads", **changes.pop("layout", {})}
    return run(config_for(corpus, **tree, layout=layout, **changes), corpus.parent / name, resume=resume)


@pytest.fixture(scope="module")
def two_ranks(corpus: Path) -> Path:
    return run_of(corpus, "two", layout={"data": {"size": 2, "sync": "zero1"}})


def test_runs_under_two_layouts_are_equal_and_say_so(corpus: Path, two_ranks: Path) -> None:
    other = run_of(corpus, "three", layout={"data": {"size": 3, "sync": "zero3"}})
    roots = [[line.get("root") for line in lines_of(out)] for out in (two_ranks, other)]
    assert roots[0] == roots[1]
    assert [root is not None for root in roots[0]] == [False, True] * 3
    assert len({*roots[0]} - {None}) == 3
    held = [[read_manifest(path).roots for _, path in steps_in(out / "checkpoints")] for out in (two_ranks, other)]
    assert held[0] == held[1]
    assert len({value for roots in held[0] for value in (roots.state, roots.data)}) == 4
    result = CliRunner().invoke(app, ["diff", str(two_ranks), str(other)])
    assert result.exit_code == 0
    assert "equal to the bit: 6 steps and the checkpoints that both have (step 3, step 6)" in result.output


def test_a_run_that_goes_on_under_another_layout_ends_with_the_same_bits(corpus: Path, two_ranks: Path) -> None:
    first = run_of(corpus, "shrunk", layout={"data": {"size": 6}})
    shutil.rmtree(first / "checkpoints" / "step-6")  # as left by a run that was killed after step 3
    run_of(corpus, "shrunk", resume=True, layout={"data": {"size": 1}})
    assert difference(two_ranks, first).equal


@pytest.mark.skipif(find_mpiexec() is None or find_spec("mpi4py") is None, reason="no MPI here")
def test_ranks_over_mpi_end_with_the_same_bits(corpus: Path, two_ranks: Path) -> None:
    other = run_of(corpus, "mpi", layout={"data": {"size": 2}, "transport": "mpi"})
    assert difference(two_ranks, other).equal


def test_runs_that_part_are_told_apart_by_step_parameter_and_box(corpus: Path, two_ranks: Path) -> None:
    changed = run_of(corpus, "rate", optimizer={"lr": 1e-2, "schedule": {"warmup": 2}})
    found = difference(two_ranks, changed)
    assert (found.step, found.checkpoint) == (2, 3)  # the first step has the same gradients and another rate
    assert {"loss", "grad_norm", "root"} == set(found.numbers)
    part = next(part for part in found.parts if part.tensor == "exp_avg of positions.weight")
    assert part.first == (0, 0)
    assert part.last == (11, 15)  # the rows of the 12 positions that a sequence has
    result = CliRunner().invoke(app, ["diff", str(two_ranks), str(changed), "--json"])
    assert json.loads(result.stdout)["step"] == 2
    assert "the runs part in step 2" in str(result.exception)
