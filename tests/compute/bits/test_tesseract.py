"""`bits: layout-free` with blocks of everything on q x q x d ranks: 2-D and 2.5-D end with the bits of one device, as
every other layout does with `bits.hidden`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.compute.bits import tesseract as tesseract_parts
from meshwright.compute.bits.tesseract import GatheredLinear
from meshwright.config import Config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from tests.compute.bits.cut_layouts import CUT, M2, M4, RUNS, U2, config_of, on_one_device
from tests.compute.bits.cut_subgraphs import ONE, subgraph
from tests.compute.bits.runs import ended

Q2 = ("layout.tensor=tesseract", "layout.tensor.q=2")
DEEP = (*Q2, "layout.tensor.d=2", "batch.micro=4")
STREAM = ("memory.summa=stream",)
ZERO3 = ("layout.data=2", "layout.data.sync=zero3")


def halved(model: str, precision: str, words: tuple[str, ...] = ()) -> Config:
    return config_of(model, precision, words, hidden=2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model, precision, words",
    [
        ("gpt2", "float32", Q2),
        ("gpt2", "float32", (*Q2, *STREAM)),
        ("llama", "O1", (*DEEP, *STREAM)),
        pytest.param("llama", "float32", (*Q2, *STREAM, *ZERO3, "memory.recompute=1"), marks=pytest.mark.long),
        pytest.param("bert", "O2", (*Q2, *STREAM, "layout.pipeline=2"), marks=pytest.mark.long),
        pytest.param("t5", "float32", (*Q2, *STREAM), marks=pytest.mark.long),
        pytest.param("gpt2", "O2", DEEP, marks=pytest.mark.long),
        pytest.param("gpt2", "float32", (*Q2, *ZERO3, "memory.summa=whole"), marks=pytest.mark.long),
        pytest.param("llama", "O1", (*Q2, "layout.pipeline=2", "memory.recompute=selective"), marks=pytest.mark.long),
        pytest.param("llama", "float32", (*Q2, *U2, "memory.recompute=1"), marks=pytest.mark.long),
        pytest.param(
            "bert", "float32", (*Q2, "layout.pipeline=2", "layout.pipeline.schedule=gpipe"), marks=pytest.mark.long
        ),
        ("t5", "float32", DEEP),
        pytest.param("transformer", "O2", Q2, marks=pytest.mark.long),
        pytest.param("gpt2", "float32", (*M4, *CUT, "batch.micro=1"), marks=pytest.mark.long),
        pytest.param("bert", "O1", M2, marks=pytest.mark.long),
        pytest.param("bert", "float32", subgraph(2), marks=pytest.mark.long),
        pytest.param("gpt2", "O2", (*subgraph(2, **ONE), "layout.pipeline=2", "layout.data=2"), marks=pytest.mark.long),
    ],
)
def test_layouts_end_with_the_bits_of_one_device(model: str, precision: str, words: tuple[str, ...]) -> None:
    assert ended(halved(model, precision, words)).differing(on_one_device(model, precision, hidden=2)) == []


@pytest.mark.long
def test_four_columns_end_with_the_bits_of_one_device() -> None:
    alone = on_one_device("gpt2", "float32", hidden=4)
    words = ("layout.tensor=tesseract", "layout.tensor.q=4", "batch.micro=4")
    for operands in ((), STREAM):
        assert ended(config_of("gpt2", "float32", (*words, *operands), hidden=4)).differing(alone) == []


def test_two_dimensions_with_a_ring_and_over_gloo_end_with_the_same_bits() -> None:
    alone = ended(halved("gpt2", "float32", (*RUNS, "batch.micro=4")))
    run = ended(halved("gpt2", "float32", (*RUNS, *Q2, *U2, "layout.context.kind=ring")), transport="torch")
    assert run.differing(alone) == []


def test_ranks_of_two_threads_end_with_the_same_bits() -> None:
    wide = {"tensor": 2, "sequence": 2, "hidden": 2}
    run = ended(config_of("llama", "float32", Q2, **wide), threads=2)
    assert run.differing(on_one_device("llama", "float32", **wide)) == []


def sums_rows_as_floats(mesh: Mesh) -> None:
    """Add the addends of a column's ranks as floats, before the rounding to integers."""
    right = tesseract_parts.dealt

    def summed(mesh: Mesh, panels: torch.Tensor) -> torch.Tensor:
        addends = right(mesh, panels)
        total = addends.sum(0)
        return torch.stack([total, *torch.zeros_like(addends[1:])])

    tesseract_parts.dealt = summed


def multiplies_whole_widths(mesh: Mesh) -> None:
    """A product's input has one part."""
    right = GatheredLinear.__init__

    def make(self: GatheredLinear, *operands: Any, **how: Any) -> None:
        right(self, *operands, **{**how, "products": replace(how["products"], inputs=1)})

    GatheredLinear.__init__ = make  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [sums_rows_as_floats, multiplies_whole_widths])
def test_a_planted_mistake_is_seen(plant: Any) -> None:
    # Four parts on two columns: a rank's width is not a kernel's.
    wrong = ended(config_of("gpt2", "float32", Q2, hidden=4), plant, transport="torch")
    assert wrong.differing(on_one_device("gpt2", "float32", hidden=4)) != []


@pytest.mark.parametrize(
    "words, field",
    [
        (("bits.hidden=3",), "bits.hidden"),
        (("bits.hidden=8",), "bits.hidden"),
        (Q2, "layout.tensor.q"),
        ((*Q2, "bits.hidden=2", "bits.tensor=1"), "layout.tensor.q"),
        ((*Q2, "bits.hidden=2", "bits.samples=2"), "bits.samples"),
    ],
)
def test_what_parts_do_not_allow_is_refused_by_name(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("gpt2", "float32", words)
    assert field in [problem.field for problem in refused.value.problems]
