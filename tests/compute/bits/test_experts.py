"""`bits: layout-free` with experts on every rank, on some, and in stages ends with the bits of one device."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest

from meshwright.config import Config, parse_config
from meshwright.config.load import parse_run
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.mesh import Mesh
from tests.compute.bits.layout_free import FIXED, PLAIN, PRECISIONS, LayoutFree, tree
from tests.compute.bits.runs import Ended, ended

MODEL: dict[str, Any] = {
    "family": "llama", "layers": 2, "hidden": 24, "heads": 4, "key_value_heads": 2, "feed_forward": 12,
    "vocabulary": 300, "positions": 64, "biases": [], "dropout": 0.1,
    "experts": {"count": 6, "per_token": 2, "balance": 0.3},
}  # fmt: skip
RUN: dict[str, Any] = {
    "model": MODEL, "data": {"sequence": 20}, "batch": {"global": 12, "micro": 2},
    "optimizer": {"lr": 1e-2, "clip": 0.5}, "steps": 2, "bits": "layout-free",
}  # fmt: skip
WORDS = {
    "float32": (),
    "float32, wide": ("model.hidden=64", "model.feed_forward=96", "data.sequence=64"),
    "O1": ("precision.level=O1", "precision.dtype=bf16"),
    "O2": ("precision=bf16",),
    "capacity": ("model.experts.capacity=0.75",),
}
LAYOUTS = {
    "microbatches of 1": ("batch.micro=1",),
    "two ranks share experts": ("layout.data=2", "layout.data.expert=2"),
    "three of six share experts": ("layout.data=6", "layout.data.expert=3", "batch.micro=1"),
    "six ranks have one each": ("layout.data=6", "layout.data.expert=6", "batch.micro=1"),
    "zero1": ("layout.data=3", "layout.data.sync=zero1"),
    "zero3": ("layout.data=4", "layout.data.expert=2", "layout.data.sync=zero3", "batch.micro=1"),
    "stages": ("layout.pipeline=2", "layout.data=2", "layout.data.expert=2"),
    "inputs in host memory": ("layout.data=2", "layout.data.expert=2", "memory.recompute=offload"),
    "recomputed": ("layout.data=2", "layout.data.expert=2", "memory.recompute=1"),
}


def run(*words: str) -> Config:
    return parse_config(RUN, words)


@cache
def on_one_device(*words: str) -> Ended:
    return ended(run(*words))


@pytest.mark.diagonal
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("words", WORDS)
def test_experts_end_with_the_bits_of_one_device(words: str, layout: str) -> None:
    given = WORDS[words]
    assert ended(run(*given, *LAYOUTS[layout])).differing(on_one_device(*given)) == []


BOUNDED = (
    "model.experts.capacity=0.75", "model.hidden=64", "model.feed_forward=64", "data.sequence=64",
    "bits={kind: layout-free, tensor: 2, sequence: 4}",
)  # fmt: skip
ONE_D = ("layout.tensor=megatron", "layout.tensor.size=2")
IN_PARTS = {
    "expert axis": ("layout.data=2", "layout.data.expert=2"),
    "1-D x expert axis": (*ONE_D, "layout.data=2", "layout.data.expert=2"),
    "cut x stages": (*ONE_D, "layout.tensor.sequence_parallel=true", "layout.pipeline=2"),
    "contexts, recomputed": ("layout.context=2", "layout.data=3", "layout.data.expert=3", "memory.recompute=1"),
}


@pytest.mark.parametrize("layout", IN_PARTS)
def test_a_capacity_has_the_bits_of_one_device_in_parts(layout: str) -> None:
    assert ended(run(*BOUNDED, *IN_PARTS[layout])).differing(on_one_device(*BOUNDED)) == []


def test_a_capacity_in_parts_drops_the_pairs_of_the_usual_mode() -> None:
    words = (*BOUNDED, "model.dropout=0", "steps=1")
    losses = [
        [float.fromhex(number) for number in ended(run(*words, *more)).numbers[0].split()]
        for more in ((), ("bits=usual",), ("model.experts.capacity=null",))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_processes_over_gloo_end_with_the_bits_of_threads(threads: int) -> None:
    words = LAYOUTS["two ranks share experts"]
    assert ended(run(*words), transport="torch", threads=threads).differing(on_one_device()) == []


def drawn(seed: int, precision: str) -> dict[str, Any]:
    """Draw a layout of a Llama with experts; return the tree of the run file."""
    random = Random(f"experts/{seed}")
    drawing = LayoutFree(random)
    for _ in range(200):
        found = drawing.case({**FIXED, "model": "llama", "precision": precision, "layers": 2, "heads": 4})
        if found is None or found[0]["data"] == 1:
            continue
        written = tree(found[0])
        written["model"] |= {
            "experts": {"count": 6, "per_token": 2, "balance": 0.3, "capacity": random.choice((None, 0.75))}
        }
        written["model"] |= {"biases": [], "feed_forward": 12}
        written["layout"]["data"]["expert"] = random.choice((2, 2, 3))
        try:
            parse_run(written)
        except ConfigError:
            continue
        alone = tree(found[0] | PLAIN)
        alone["model"] = written["model"]
        return {"layout": written, "alone": alone}
    raise AssertionError("draws do not end")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 60))])
def test_drawn_layouts_of_experts_end_with_the_bits_of_one_device(seed: int) -> None:
    trees = drawn(seed, PRECISIONS[seed % len(PRECISIONS)])
    assert ended(parse_run(trees["layout"])).differing(ended(parse_run(trees["alone"]))) == [], trees["layout"]


def multiplies_together(mesh: Mesh) -> None:
    """Multiply an expert's rows of all ranks in one product, as in the usual mode."""
    from meshwright.compute.bits.experts import SeparateExperts
    from meshwright.compute.tensor.experts import Experts, GroupedLinear

    SeparateExperts.linear = GroupedLinear
    SeparateExperts.outputs = Experts.outputs  # type: ignore[method-assign]
    SeparateExperts.outputs_here = Experts.outputs_here  # type: ignore[method-assign]


def test_rows_that_are_multiplied_together_are_seen() -> None:
    words = LAYOUTS["two ranks share experts"]
    assert ended(run(*words), multiplies_together, transport="torch").differing(on_one_device()) != []


DEEPSEEK: dict[str, Any] = {
    "family": "deepseek", "layers": 2, "hidden": 32, "heads": 4, "query_rank": 16, "key_value_rank": 16,
    "head_width": 8, "rotary_width": 4, "value_width": 8, "feed_forward": 48, "later_tokens": 1, "positions": 32,
    "vocabulary": 300, "tied": True, "dropout": 0.1,
    "experts": {
        "count": 6, "per_token": 2, "width": 16, "dense_layers": 1, "shared": 16, "scores": "sigmoid", "groups": 3,
        "groups_per_token": 2, "bias_rate": 0.01, "balance": 0.3, "balance_over": "batch",
    },
}  # fmt: skip
"""Biases that move by loads, a balance over the step's batch, and a later token."""


def deepseek(*words: str) -> Config:
    return parse_config(RUN | {"model": DEEPSEEK}, words)


@cache
def deepseek_on_one_device() -> Ended:
    return ended(deepseek())


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moving_biases_and_later_tokens_end_with_the_bits_of_one_device(layout: str) -> None:
    alone = deepseek_on_one_device()
    assert any("router.bias" in name and values.any() for name, values in alone.tensors.items())
    assert ended(deepseek(*LAYOUTS[layout])).differing(alone) == []


def balances_by_rank(mesh: Mesh) -> None:
    """Rank 1 balances by other loads than rank 0."""
    from meshwright.compute.tensor.router import Router

    balance, shift = Router.balance_by, mesh.rank
    Router.balance_by = lambda self, loads: balance(self, loads + shift)  # type: ignore[method-assign]


def counts_whole_microbatches(mesh: Mesh) -> None:
    """The pass that counts loads computes a microbatch at once, with other masks and kernels than the step."""
    from meshwright.strategies.pipeline.stage import Stage

    preview = Stage.preview

    def whole(self: Stage, *given: Any) -> Any:
        kept, self.portions = self.portions, None
        found = preview(self, *given)
        self.portions = kept
        return found

    Stage.preview = whole  # type: ignore[method-assign]


def moves_by_own_loads(mesh: Mesh) -> None:
    """Leave rank 1's loads out of the biases' sums."""
    from meshwright.compute.parameters.fixed import FixedPoint

    add, rank = FixedPoint.add, mesh.rank

    def some(self: FixedPoint, total: Any, addend: Any, *, fresh: bool, digits: int = 52) -> None:
        add(self, total, addend * (rank == 0) if digits == 0 else addend, fresh=fresh, digits=digits)

    FixedPoint.add = some  # type: ignore[method-assign]


@pytest.mark.few(1)
@pytest.mark.parametrize("plant", [balances_by_rank, counts_whole_microbatches, moves_by_own_loads])
def test_a_planted_mistake_of_loads_is_seen(plant: Any) -> None:
    planted = ended(deepseek(*LAYOUTS["two ranks share experts"]), plant, transport="torch")
    assert planted.differing(deepseek_on_one_device()) != []
