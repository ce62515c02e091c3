"""`bits: layout-free`: every layout ends with the weights, moments, losses and norms of one device, to the bit.

Layouts are the fuzzer's, drawn along all axes that the mode knows; the config refuses all other axes.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from meshwright.compute.parameters.fixed import FixedPoint
from meshwright.config import Config, parse_config
from meshwright.config.load import parse_run
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from tests.compute.bits.layout_free import FIXED, PLAIN, PRECISIONS, LayoutFree, tree
from tests.compute.bits.runs import GPT2, Ended, ended
from tests.fuzz.axes import AXES, Case

MODELS = ("gpt2", "gpt2-untied", "llama", "bert", "bert-megatron", "transformer", "t5", "vit")
COVERED = ("gpt2", "llama", "bert")
"""The models of the covering set of tests/fuzz/test_bits.py."""


def drawn(seed: int, **values: Any) -> Case:
    found = LayoutFree(Random(seed)).case({**FIXED, **values})
    assert found is not None, "no layout"
    return found[0]


@cache
def on_one_device(*values: tuple[str, Any]) -> Ended:
    return ended(parse_run(tree(dict(values))))


def check(case: Case, **how: Any) -> None:
    alone = on_one_device(*(case | PLAIN).items())
    assert ended(parse_run(tree(case)), **how).differing(alone) == []


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.long if n >= 8 or MODELS[n] in COVERED else ()) for n in range(12)]
)
def test_a_drawn_layout_ends_with_the_bits_of_one_device(number: int) -> None:
    model, precision = MODELS[number % len(MODELS)], PRECISIONS[number % 4 if number < 8 else (number + 1) % 4]
    check(drawn(number, model=model, precision=precision, vocabulary="padded"))


@pytest.mark.long
@pytest.mark.parametrize("number", range(500))
def test_500_drawn_layouts_end_with_the_bits_of_one_device(number: int) -> None:
    """A model has one size in each precision, so that a run on one device serves many layouts."""
    model, precision = MODELS[number % len(MODELS)], PRECISIONS[number // len(MODELS) % 4]
    sizes = {"layers": 2, "heads": 4, "vocabulary": "whole", "sequence": 8, "clip": 0.5, "optimizer": "adamw"}
    check(drawn(1000 + number, model=model, precision=precision, **sizes))


def gpt2(*words: str) -> Config:
    return parse_config(GPT2, words)


@pytest.mark.parametrize(
    "words",
    [pytest.param(("layout.data=2",), marks=pytest.mark.long), ("layout.data=3", "layout.data.sync=zero1")],
)
def test_processes_over_gloo_end_with_the_bits_of_threads(words: tuple[str, ...]) -> None:
    assert ended(gpt2(*words), transport="torch").differing(ended(gpt2())) == []


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_every_elementwise_optimizer_ends_with_the_bits_of_one_device(optimizer: str) -> None:
    words = (f"optimizer={optimizer}", "layout.data=3", "layout.data.sync=zero1")
    assert ended(gpt2(*words)).differing(ended(gpt2(words[0]))) == []


@pytest.mark.parametrize("threads", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_of_many_threads_end_with_the_bits_of_one(threads: int) -> None:
    assert ended(gpt2("layout.data=2"), threads=threads).differing(ended(gpt2())) == []


def sums_floats(mesh: Mesh) -> None:
    """Round after the addition, which then depends on the order of microbatches and ranks."""

    def add(self: FixedPoint, total: torch.Tensor, addend: torch.Tensor, *, fresh: bool, digits: int = 52) -> None:
        before = 0 if fresh else total.to(torch.float32) * self.quantum
        total.copy_(((before + addend.view(total.shape)) / self.quantum).round())

    FixedPoint.add = add  # type: ignore[method-assign]


def draws_by_rank(mesh: Mesh) -> None:
    """Rank 1 draws dropout's masks from other numbers."""
    from meshwright.compute.bits.grains import SampleGrains

    begin = SampleGrains.begin_step
    shift = mesh.rank

    def begin_elsewhere(self: SampleGrains, first: int, scale: float) -> None:
        begin(self, first, scale)
        self.seed += shift

    SampleGrains.begin_step = begin_elsewhere  # type: ignore[method-assign]


def multiplies_another_shape(mesh: Mesh) -> None:
    """Make a microbatch one grain: kernels get the microbatch's shape."""
    from meshwright.compute.bits.grains import SampleGrains

    make = SampleGrains.__init__

    def make_coarse(self: SampleGrains, samples: int, micro: int, seed: int, **how: Any) -> None:
        make(self, micro, micro, seed, **how)

    SampleGrains.__init__ = make_coarse  # type: ignore[method-assign]


@pytest.mark.few(2)
@pytest.mark.parametrize("plant", [sums_floats, draws_by_rank, multiplies_another_shape])
def test_a_planted_mistake_is_seen(plant: Any) -> None:
    assert ended(gpt2("layout.data=2"), plant, transport="torch").differing(ended(gpt2())) != []


MUON = ("optimizer=muon", "model.layers=1", "steps=2")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        ("layout.data=2", "layout.data.sync=zero1"),
        ("layout.data=3", "layout.data.sync=zero2", "batch.micro=2"),
        ("layout.data=4",),
    ],
)
def test_whole_matrices_are_stepped_with_the_bits_of_one_device(words: tuple[str, ...]) -> None:
    assert ended(gpt2(*MUON, *words), threads=2).differing(ended(gpt2(*MUON))) == []


def squares_another_side(mesh: Mesh) -> None:
    """Rank 1 makes the transposed matrix orthogonal: the same result from kernels of other shapes."""
    from meshwright.strategies.optim import muon

    own, turns = muon.orthogonal, mesh.rank == 1
    muon.orthogonal = lambda matrix: own(matrix.t().contiguous()).t() if turns else own(matrix)


def test_a_matrix_stepped_from_another_side_is_seen() -> None:
    words = (*MUON, "layout.data=2", "layout.data.sync=zero1")
    assert ended(gpt2(*words), squares_another_side, transport="torch").differing(ended(gpt2(*MUON))) != []


@pytest.mark.parametrize(
    "words, field",
    [
        (("layout.tensor=megatron", "layout.tensor.size=2"), "layout.tensor.size"),
        (("layout.context=2",), "layout.context.size"),
        (("layout.data.sync=server-loss", "layout.data.size=2"), "layout.data.sync"),
        (("bits.samples=3",), "bits.samples"),
        (("precision=fp16", "precision.loss_scale.initial=1000"), "precision.loss_scale.initial"),
        (("compile=islands",), "compile"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        gpt2(*words)
    assert field in [problem.field for problem in refused.value.problems]


def test_the_axes_of_the_fuzzer_are_all_known() -> None:
    identity = {
        "model", "layers", "heads", "vocabulary", "sequence", "documents", "precision", "clip", "optimizer", "frozen",
        "adapter",
    }  # fmt: skip
    assert set(AXES) == PLAIN.keys() | FIXED.keys() | identity
