"""`bits: layout-free` with branches on sub-grids of ranks: each form of D&SP ends with the bits of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compute.bits.grains import SampleGrains
from meshwright.compute.subgraph import segment
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import start_tree_reduce
from meshwright.tools.diff import difference
from tests.compute.bits.cut_layouts import RUNS, check, config_of, on_one_device
from tests.compute.bits.cut_subgraphs import BLOCK, CORE, ONE, subgraph
from tests.compute.bits.runs import ended
from tests.training.runs import config_for, make_corpus, run
from tests.workers import run_ranks


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "model, precision, words",
    [
        ("gpt2", "float32", (*subgraph(2, **BLOCK), "layout.context=2", "layout.data=2", "layout.data.sync=zero3")),
        pytest.param(
            "gpt2", "float32", (*subgraph(4, **ONE), "layout.pipeline=2", "batch.micro=1"), marks=pytest.mark.long
        ),
        pytest.param("gpt2", "O2", (*subgraph(4, **CORE), "batch.micro=4"), marks=pytest.mark.long),
        ("llama", "float32", (*subgraph(2), "memory.recompute=1", "layout.pipeline=2")),
        pytest.param("llama", "O1", subgraph(2, **CORE), marks=pytest.mark.long),
        pytest.param(
            "bert",
            "float32",
            (*subgraph(4, **BLOCK), "memory.recompute=selective", "batch.micro=4"),
            marks=pytest.mark.long,
        ),
        pytest.param("bert", "O2", subgraph(2, **ONE, **CORE), marks=pytest.mark.long),
        ("t5", "float32", (*subgraph(2, **ONE, **BLOCK), "layout.data=2")),
        ("t5", "float32", subgraph(2)),
        ("t5", "float32", (*subgraph(4, **CORE), "layout.pipeline=2", "batch.micro=4")),
        pytest.param("t5", "O2", (*subgraph(2, **BLOCK), "layout.data=2", "layout.pipeline=2"), marks=pytest.mark.long),
        pytest.param("t5", "O1", (*subgraph(4), "memory.recompute=selective", "batch.micro=4"), marks=pytest.mark.long),
        ("transformer", "float32", subgraph(2, **BLOCK)),
    ],
)
def test_sub_grids_end_with_the_bits_of_one_device(model: str, precision: str, words: tuple[str, ...]) -> None:
    check(model, precision, words)


def test_sub_grids_with_a_ring_and_over_gloo_end_with_the_same_bits() -> None:
    words = (*subgraph(2, **BLOCK), "layout.context=2", "layout.context.kind=ring")
    alone = ended(config_of("gpt2", "float32", (*RUNS, "batch.micro=4")))
    assert ended(config_of("gpt2", "float32", (*RUNS, *words)), transport="torch").differing(alone) == []


def takes_one_grain(mesh: Mesh) -> None:
    """Give all samples the masks of the first rank's samples."""
    right = SampleGrains.draw
    SampleGrains.draw = lambda self, shares: [right(self, shares)[0]] * shares  # type: ignore[method-assign]


def adds_as_they_come(mesh: Mesh) -> None:
    """Sum branches' outputs in the transport's order."""
    segment.start_tree_reduce_scatter = segment.start_reduce_scatter  # type: ignore[assignment]


@pytest.mark.parametrize(
    "plant, words", [(takes_one_grain, subgraph(2)), (adds_as_they_come, (*subgraph(4, **BLOCK), "batch.micro=4"))]
)
def test_a_planted_mistake_is_seen(plant: Any, words: tuple[str, ...]) -> None:
    wrong = ended(config_of("gpt2", "float32", words), plant, transport="torch")
    assert wrong.differing(on_one_device("gpt2", "float32")) != []


def _sum_at_the_first(mesh: Mesh) -> list[float]:
    addend = torch.tensor([1.0, 2.0**-24]) if mesh.rank == 0 else torch.full((2,), 2.0**-24)
    return start_tree_reduce(addend, mesh.comm("branch")).wait().tolist()


def test_a_sum_at_the_first_rank_has_the_order_of_a_tree() -> None:
    first, *_ = run_ranks(_sum_at_the_first, Grid((("branch", 4),)))
    assert first == [1.0 + 2.0**-23, 2.0**-22]  # one after another: 1, since each is half of the last digit


@pytest.mark.parametrize("tensor", [{"kind": "subgraph", "size": 2}, {"kind": "tesseract", "q": 2}], ids=["2", "2 x 2"])
def test_a_run_goes_on_on_sub_grids_and_blocks_with_the_same_bits(tensor: dict[str, Any], tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    tree: dict[str, Any] = {
        "model": {
            "layers": 2, "hidden": 64, "heads": 4, "positions": 32, "vocabulary": 300, "vocabulary_multiple": 64,
            "dropout": 0.1,
        },
        "data": {"source": str(corpus), "sequence": 32},
        "batch": {"global": 4, "micro": 2},
        "precision": "float32",
        "bits": {"kind": "layout-free", "tensor": 2, "hidden": 2},
        "check": {"root_every": 1},
        "checkpoint": {"every": 2, "keep": 3},
        "validation": {"every": 2, "batches": 1},
    }  # fmt: skip
    cut = {"tensor": tensor, "transport": "threads"}
    alone = run(config_for(corpus, **tree, steps=4, layout={"transport": "threads"}), tmp_path / "alone")
    moved = run(config_for(corpus, **tree, steps=2, layout={"data": 2, "transport": "threads"}), tmp_path / "moved")
    run(config_for(corpus, **tree, steps=4, layout=cut), moved, resume=True)
    assert difference(moved, alone).equal


@pytest.mark.parametrize(
    "model, words, field",
    [
        ("gpt2", ("bits.tensor=2", *subgraph(4)), "layout.tensor.size"),
        ("gpt2", (*subgraph(2), "bits.samples=2"), "bits.samples"),
    ],
)
def test_what_parts_and_grains_do_not_allow_is_refused_by_name(model: str, words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(model, "float32", words)
    assert field in [problem.field for problem in refused.value.problems]
