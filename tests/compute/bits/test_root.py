"""Roots, and where two runs part."""

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
from meshwright.compute.parameters.root import box_hash, elements_hash, order_root, root_text
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.machine import find_mpiexec
from meshwright.tools.diff import difference
from meshwright.training.checkpoint.manifest import read_manifest
from meshwright.training.checkpoint.reader import steps_in
from tests.training.runs import config_for, lines_of, make_corpus, run

SHAPE = (6, 10)


def test_pieces_add_up_to_the_whole() -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    whole = box_hash("weight of a", SHAPE, Box((0, 0), SHAPE), x.flatten())
    for boxes in ([Box((0, 0), (6, 4)), Box((0, 4), (6, 6))], [Box((row, 0), (1, 10)) for row in range(6)]):
        parts = [box_hash("weight of a", SHAPE, box, x[box.slices].flatten()) for box in boxes]
        assert torch.stack(parts).sum() == whole


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_slices_of_flat_memory_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(root, "BLOCK", block)
    shape, box = (9, 10), Box((2, 1), (4, 7))
    x = torch.randn(28, generator=torch.Generator().manual_seed(1))
    whole = box_hash("a", shape, box, x)
    for cuts in ([0, 28], [0, 5, 28], [0, 1, 14, 20, 27, 28]):
        slices = [elements_hash("a", shape, box, start, x[start:stop]) for start, stop in pairwise(cuts)]
        assert torch.stack(slices).sum() == whole


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
    others |= {int(box_hash("b", SHAPE, box, x)), int(box_hash("a", SHAPE, box, -x))}
    assert len(others | {known}) == 5
    assert root_text([known]) != root_text([known, 1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("runs"))


def run_of(corpus: Path, name: str, *, resume: bool = False, **changes: Any) -> Path:
    """A run of six steps whose bits are layout-free, with ranks as threads."""
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
    shutil.rmtree(first / "checkpoints" / "step-6")  # as a run that was killed behind step 3 leaves it
    run_of(corpus, "shrunk", resume=True, layout={"data": {"size": 1}})
    assert difference(two_ranks, first).equal


@pytest.mark.skipif(find_mpiexec() is None or find_spec("mpi4py") is None, reason="no MPI here")
def test_ranks_over_mpi_end_with_the_same_bits(corpus: Path, two_ranks: Path) -> None:
    other = run_of(corpus, "mpi", layout={"data": {"size": 2}, "transport": "mpi"})
    assert difference(two_ranks, other).equal


def test_runs_that_part_are_told_apart_by_step_parameter_and_box(corpus: Path, two_ranks: Path) -> None:
    changed = run_of(corpus, "rate", optimizer={"lr": 1e-2, "schedule": {"warmup": 2}})
    found = difference(two_ranks, changed)
    assert (found.step, found.checkpoint) == (2, 3)  # the first step's gradients are the same, and its rate another
    assert {"loss", "grad_norm", "root"} == set(found.numbers)
    part = next(part for part in found.parts if part.tensor == "exp_avg of positions.weight")
    assert part.first == (0, 0)
    assert part.last == (11, 15)  # the rows of the 12 positions that a sequence has
    result = CliRunner().invoke(app, ["diff", str(two_ranks), str(changed), "--json"])
    assert json.loads(result.stdout)["step"] == 2
    assert "the runs part in step 2" in str(result.exception)
