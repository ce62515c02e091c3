"""`bits: layout-free` with cut layers and sequences: 1-D, sequence parallelism, cut vocabularies, shared key-value
heads and Ulysses, each next to axes of data, end with the bits of one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.bits import assembly, blocks
from meshwright.compute.bits.grains import SampleGrains
from meshwright.config import Config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import start_tree_all_reduce, tree_sum
from meshwright.tools.diff import difference
from tests.compute.bits.cut_layouts import CUT, M2, M4, MODELS, PRECISIONS, U2, U4, check, config_of, on_one_device
from tests.compute.bits.runs import Ended, ended
from tests.training.runs import config_for, make_corpus, run
from tests.workers import run_ranks


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "model, precision, words",
    [
        pytest.param("gpt2", "float32", M2, marks=pytest.mark.long),
        ("gpt2", "float32", (*M4, *CUT, "layout.data=2", "layout.data.sync=zero3", "batch.micro=1")),
        pytest.param("gpt2", "float32", (*U4, "layout.pipeline=2", "batch.micro=1"), marks=pytest.mark.long),
        pytest.param("gpt2", "O2", (*M2, *CUT, *U2), marks=pytest.mark.long),
        pytest.param("llama", "float32", (*M4, "memory.recompute=selective"), marks=pytest.mark.long),
        pytest.param(
            "llama",
            "float32",
            (*M2, *CUT, "layout.pipeline=2", "layout.data=2", "batch.micro=1"),
            marks=pytest.mark.long,
        ),
        pytest.param("llama", "O1", (*M4, *CUT), marks=pytest.mark.long),
        pytest.param("llama", "O2", (*M2, *U2, "memory.recompute=1"), marks=pytest.mark.long),
        pytest.param("llama", "O2", (*U4, "layout.data=2", "layout.data.sync=zero1"), marks=pytest.mark.long),
        pytest.param("bert", "float32", (*M2, *CUT, *U2), marks=pytest.mark.long),
        pytest.param("bert", "O1", (*M4, "layout.data=2"), marks=pytest.mark.long),
        ("t5", "float32", (*M4, *CUT)),
        pytest.param("t5", "O2", (*M2, "layout.pipeline=2"), marks=pytest.mark.long),
        ("transformer", "float32", (*M2, *CUT, "memory.recompute=selective")),
    ],
)
def test_a_cut_layout_ends_with_the_bits_of_one_device(model: str, precision: str, words: tuple[str, ...]) -> None:
    check(model, precision, words)


LAYOUTS = [
    (*tensor, *context)
    for tensor in ((), M2, M4, (*M2, *CUT), (*M4, *CUT))
    for context in ((), U2, U4)
    if not (context == U4 and CUT[0] in tensor) and not (context == U2 and tensor == (*M4, *CUT))
]
BESIDE = (
    (), ("layout.data=2",), ("layout.data=2", "layout.data.sync=zero2", "batch.micro=1"), ("layout.pipeline=2",),
    ("layout.pipeline=2", "layout.pipeline.schedule=gpipe", "batch.micro=1"), ("memory.recompute=selective",),
    ("layout.data=4", "layout.data.sync=zero3", "batch.micro=1"), ("memory.recompute=1", "batch.micro=1"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("number", range(120))
def test_drawn_cut_layouts_end_with_the_bits_of_one_device(number: int) -> None:
    draw = Random(number)
    model, precision = list(MODELS)[number % len(MODELS)], draw.choice(list(PRECISIONS))
    uncut = model in ("t5", "transformer")  # sequences of these models are whole in attention
    layouts = [words for words in LAYOUTS if not (uncut and {*U2, *U4} & {*words})]
    for _ in range(20):
        words = (*draw.choice(layouts), *draw.choice(BESIDE))
        try:
            config_of(model, precision, words)
        except ConfigError:
            continue
        check(model, precision, words)
        return
    raise AssertionError("no layout")


def test_processes_over_gloo_and_ranks_of_two_threads_end_with_the_same_bits() -> None:
    check("gpt2", "float32", (*M4, *CUT), transport="torch")
    wide = {"tensor": 2, "sequence": 2}  # 16 tokens and columns a block: whole vectors for each thread
    alone = on_one_device("llama", "float32", **wide)
    assert ended(config_of("llama", "float32", (*M2, *CUT), **wide), threads=2).differing(alone) == []


def adds_from_the_end(mesh: Mesh) -> None:
    """Add parts from the last to the first."""

    def add(addends: Iterable[Tensor]) -> Tensor:
        first, *others = list(addends)[::-1]
        total = first.clone()
        for other in others:
            total += other
        return total

    blocks.tree_sum = add


def multiplies_other_rows(mesh: Mesh) -> None:
    """Make a rank's runs one: kernels get the rank's shape."""
    right = assembly.blocks_of
    assembly.blocks_of = lambda config, mesh: replace(right(config, mesh), runs=1, outer_runs=1)


def draws_by_rank(mesh: Mesh) -> None:
    """Rank 1 takes the masks of other blocks."""
    right, shift = SampleGrains.draw, mesh.rank
    SampleGrains.draw = lambda self, shares: [number + shift for number in right(self, shares)]  # type: ignore


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "plant, words", [(adds_from_the_end, ()), (multiplies_other_rows, U2), (draws_by_rank, (*M2, *CUT))]
)
def test_a_planted_mistake_is_seen(plant: Any, words: tuple[str, ...]) -> None:
    ended_wrong = ended(config_of("gpt2", "float32", words), plant, transport="torch")
    assert ended_wrong.differing(on_one_device("gpt2", "float32")) != []


def test_a_tree_adds_neighbours_and_then_their_sums() -> None:
    a, b, c, d = (torch.tensor(x) for x in (1.0, 2.0**-24, 2.0**-24, 2.0**-24))
    assert float(tree_sum([a.clone(), b.clone(), c.clone(), d.clone()])) == float((a + b) + (c + d))
    assert float((a + b) + (c + d)) != float(((a + b) + c) + d)


SIXTHS = (
    "model.hidden=192",
    "model.vocabulary_multiple=48",
    "model.positions=48",
    "data.sequence=48",
    "batch.global=6",
)
THREE = ("layout.tensor=megatron", "layout.tensor.size=3")


@cache
def in_sixths(model: str, *words: str) -> Ended:
    heads = 6 if model == "gpt2" else 12
    more = (f"model.heads={heads}", *(("model.key_value_heads=3", "model.feed_forward=384") if heads == 12 else ()))
    return ended(config_of(model, "float32", (*SIXTHS, *more, *words), tensor=6, sequence=6))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "model, words",
    [
        ("gpt2", THREE),
        ("gpt2", ("layout.tensor=megatron", "layout.tensor.size=6", "layout.tensor.sequence_parallel=true")),
        ("llama", (*THREE, *U2)),
        ("llama", ("layout.context=3", "layout.pipeline=2", "batch.micro=1")),
        ("gpt2", ("layout.tensor=subgraph", "layout.tensor.size=3", "batch.micro=3")),
    ],
)
def test_parts_that_are_no_power_of_two_end_with_the_bits_of_one_device(model: str, words: tuple[str, ...]) -> None:
    assert in_sixths(model, *words).differing(in_sixths(model)) == []


def test_ranks_with_three_parts_each_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout.tensor.size=2 leaves a rank 3 of bits.tensor=6 parts"):
        in_sixths("gpt2", *M2)


def _sum_of_three(mesh: Mesh) -> list[float]:
    addend = torch.tensor([1.0, 2.0**-24, 2.0**-24, 0.0])[[mesh.rank, 0, 1, 2]]
    return start_tree_all_reduce(addend.clone(), mesh.comm("tensor")).wait().tolist()


def test_three_ranks_add_neighbours_first() -> None:
    """Four elements, which three ranks do not cut evenly: the first is (1 + 2^-24) + 2^-24, in this order 1."""
    for total in run_ranks(_sum_of_three, Grid((("tensor", 3),))):
        assert total == [1.0, 3.0, 3 * 2.0**-24, 3 * 2.0**-24]
    assert float(tree_sum([torch.tensor(x) for x in (1.0, 2.0**-24, 2.0**-24)])) == 1.0


def test_a_run_goes_on_under_another_cut_with_the_same_bits(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    tree: dict[str, Any] = {
        "model": {
            "layers": 2, "hidden": 64, "heads": 4, "positions": 32, "vocabulary": 300, "vocabulary_multiple": 64,
            "dropout": 0.1,
        },
        "data": {"source": str(corpus), "sequence": 32},
        "batch": {"global": 4, "micro": 2},
        "precision": "float32",
        "bits": {"kind": "layout-free", "tensor": 2, "sequence": 2},
        "check": {"root_every": 1},
        "checkpoint": {"every": 2, "keep": 3},
        "validation": {"every": 2, "batches": 1},
    }  # fmt: skip
    megatron = {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}, "transport": "threads"}
    ulysses = {"context": {"size": 2}, "data": 2, "transport": "threads"}
    undisturbed = run(config_for(corpus, **tree, steps=4, layout={"transport": "threads"}), tmp_path / "undisturbed")
    moved = run(config_for(corpus, **tree, steps=2, layout=megatron), tmp_path / "moved")
    run(config_for(corpus, **tree, steps=4, layout=ulysses), moved, resume=True)
    assert difference(moved, undisturbed).equal


@pytest.mark.parametrize(
    "words, field",
    [
        (("bits.tensor=3",), "bits.tensor"),
        (("bits.tensor=2", *M4), "layout.tensor.size"),
        (("bits.tensor=16",), "bits.tensor"),
        (("bits.sequence=5",), "bits.sequence"),
        (("bits.sequence=1", *U2), "layout.context.size"),
        (("bits.sequence=2", *M4, *CUT), "layout.tensor.size"),
        (("bits.sequence=32",), "bits.sequence"),
        (("model.heads=4", *M4, *U2), "layout.context.size"),
        (("layout.tensor={kind: tesseract, q: 2}",), "layout.tensor.q"),
        (("layout.context=2", "layout.context.kind=ring", "model.dropout=0.0"), "layout.context.kind"),
    ],
)
def test_what_the_grain_does_not_allow_is_refused_by_name(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("gpt2", "float32", words)
    assert field in [problem.field for problem in refused.value.problems]


def leaves_vectors_incomplete(mesh: Mesh) -> None:
    """Leave out the padding: activations have the rank's rows alone."""
    from meshwright.compute.tensor.whole_vectors import InWholeVectors

    InWholeVectors.pad = lambda self: None  # type: ignore[method-assign]


ODD = ("model.feed_forward=88", "data.sequence=20")
"""Parts of 44 and 22 gates, and 20 tokens: no whole vectors of 64 elements."""


def odd_widths(*words: str) -> Config:
    return config_of("llama", "float32", (*ODD, *words), tensor=4, sequence=2)


@pytest.mark.parametrize("words", [M2, (*M4, *U2), (*M2, *CUT)])
def test_widths_that_are_no_whole_vectors_have_the_bits_of_one_device(words: tuple[str, ...]) -> None:
    assert ended(odd_widths(*words)).differing(ended(odd_widths("batch.micro=4"))) == []


def test_incomplete_vectors_are_seen() -> None:
    """Both runs leave out the padding: the difference is from the code for the rest of a vector."""
    plant = {"plant": leaves_vectors_incomplete, "transport": "torch"}
    assert ended(odd_widths(*M4), **plant).differing(ended(odd_widths("batch.micro=4"), **plant)) != []
