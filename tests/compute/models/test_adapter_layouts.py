"""Adapters under every axis compute one device's numbers: float64 gradients to 1e-12 relative, losses to 1e-10."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.ranks.errors import ConfigError
from tests.compute.models.adapted import adapted
from tests.families.llama.layouts import LAYOUTS, RING, SUBGRAPH, ZERO1
from tests.oracle.context import BLOCKS, CUT, ONE_D
from tests.oracle.run import check, run


@cache
def one_device(*on: str) -> Any:
    return run(adapted({}, {"on": on} if on else {}))[0]


MORE: dict[str, dict[str, Any]] = {
    "1-D x zero2": {"tensor": ONE_D, "data": {"size": 2, "sync": "zero2", "bucket": 2048}},
    "cut x zero3": {"tensor": CUT, "data": {"size": 2, "sync": "zero3"}},
    "chunks": {"pipeline": {"size": 1, "chunks": 2}},
    "1f1b x cut": {"pipeline": {"size": 2, "schedule": "1f1b"}, "tensor": CUT},
    "v x replicas": {"pipeline": {"size": 2, "chunks": 2, "placement": "v", "partition": [0, 1, 1, 0]}, "data": ZERO1},
}
SHORT = {"1-D", "1-D of 4, cut", "2-D", "branches", "ring x cut x stages x replicas", "cut x zero3", "branches' cores"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in {**LAYOUTS, **MORE}],
)
def test_equals_one_device(name: str) -> None:
    check(run(adapted({**LAYOUTS, **MORE}[name])), one_device())


@pytest.mark.parametrize("name", ["1-D of 4, cut", "2-D"])
def test_parts_of_linears_alone(name: str) -> None:
    on = ("query", "v_proj", "gate", "blocks.1.*.contract")
    results = run(adapted(LAYOUTS[name], {"on": on}))
    check(results, one_device(*on))
    names = {name.partition(".adapter.")[0].rpartition(".")[2] for _, held in results for name in held}
    assert names == {"query_key_value", "expand", "contract"}


SHARED = {"1-D": ONE_D | {"size": 4}, "cut": CUT | {"size": 4}}


@cache
def of_two_heads() -> Any:
    return run(adapted({}, model={"key_value_heads": 2}))[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "cut" else pytest.mark.long) for n in SHARED])
def test_key_value_heads_that_ranks_share(name: str) -> None:
    check(run(adapted({"tensor": SHARED[name]}, model={"key_value_heads": 2})), of_two_heads())


EXPERTS = {
    "biases": ["query-key-value"],
    "experts": {"count": 4, "per_token": 2, "balance": 0.3},
    "feed_forward": 16,
    "layers": 1,
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "expert axis": {"data": {"size": 2, "expert": 2, "bucket": 4096}},
    "1-D": {"tensor": ONE_D},
    "cut x expert axis": {"tensor": CUT, "data": {"size": 2, "expert": 2}},
    "ring x stages": {"context": RING, "pipeline": {"size": 1}},
}


@cache
def with_experts() -> Any:
    return run(adapted({}, model=EXPERTS))[0]


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_each_expert_has_an_adapter(name: str) -> None:
    results = run(adapted(EXPERT_LAYOUTS[name], model=EXPERTS))
    check(results, with_experts())
    assert any("feed_forward.expand.adapter.a" in name for name in results[0][1])


@pytest.mark.parametrize("recompute", ["selective", 1])
def test_recomputed(recompute: str | int) -> None:
    check(run(adapted(LAYOUTS["ulysses x 1-D"], memory={"recompute": recompute})), one_device())


MAGNITUDES: dict[str, dict[str, Any]] = {
    "1-D x stages": {"tensor": ONE_D, "pipeline": {"size": 2}},
    "cut x zero3": {"tensor": CUT, "data": {"size": 2, "sync": "zero3"}},
    "ring x replicas": {"context": RING, "data": ZERO1},
}


@cache
def with_magnitudes() -> Any:
    return run(adapted({}, {"dora": True}))[0]


@pytest.mark.parametrize("name", MAGNITUDES)
def test_magnitudes(name: str) -> None:
    results = run(adapted(MAGNITUDES[name], {"dora": True}))
    check(results, with_magnitudes())
    assert any(".adapter.d." in name for name in results[0][1])


def test_rslora_and_alpha() -> None:
    scale = {"rank": 4, "alpha": 6.0, "rslora": True}
    alone = run(adapted({}, scale))[0]
    check(run(adapted(LAYOUTS["1-D"], scale)), alone)
    assert alone[0][0] != one_device()[0][0]


@pytest.mark.parametrize(
    "adapter, changes, message",
    [
        ({"rank": 3}, {"layout": {"tensor": BLOCKS}}, "layout.tensor.q=2 does not divide model.adapter.rank=3"),
        (
            {},
            {"layout": {"data": {"size": 2, "sync": "server-loss"}}},
            "model.frozen or model.adapter leaves some without",
        ),
        (
            {},
            {"precision": {"level": "O2", "dtype": "bf16", "products": "fp8"}, "model": {"layers": 3}},
            "precision.products=fp8 would multiply adapters of rank 4",
        ),
        ({"dropout": 0.1}, {"model": EXPERTS}, "model.adapter.dropout"),
        ({"dora": True}, {"model": EXPERTS}, "model.adapter.dora"),
        ({"dora": True, "dropout": 0.1}, {}, "model.adapter.dropout=0.1 "),
        ({"dora": True}, {"layout": {"tensor": BLOCKS}}, "model.adapter.dora"),
        ({"dora": True}, {"layout": {"tensor": SUBGRAPH}}, "model.adapter.dora"),
        (
            {"dora": True},
            {"layout": {"tensor": ONE_D | {"size": 4}}, "model": {"key_value_heads": 2}},
            "model.adapter.dora",
        ),
    ],
)
def test_what_does_not_go_is_refused(adapter: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    layout = changes.pop("layout", {})
    with pytest.raises(ConfigError) as refusal:
        adapted(layout, adapter, **changes)
    assert message in str(refusal.value)
