"""Gated delta nets and gated attention under every axis equal one device: float64 gradients to 1e-12.

Ranks with parts of sequences send delta nets' states on; each document of a sequence begins with states of zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from tests.families.llama.layouts import LAYOUTS, ULYSSES
from tests.oracle.context import CUT, ONE_D, config_for
from tests.oracle.run import check, run
from tests.oracle.tensor import MODELS as SHAPES

EXPERTS = {"count": 4, "per_token": 2, "width": 12, "shared": 16, "shared_gate": True, "balance": 0.1}
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "experts": {"experts": EXPERTS}}
SEPARATE = {"sequence": 24, "documents": "separate"}

ALSO: dict[str, dict[str, Any]] = {
    "1-D of 4": {"tensor": ONE_D | {"size": 4}},
    "ulysses of 4": {"context": ULYSSES | {"size": 4}},
    "zero2": {"data": {"size": 2, "sync": "zero2"}},
    "chunks": {"pipeline": {"size": 2, "chunks": 2, "schedule": "1f1b"}},
}
ALL = LAYOUTS | ALSO
FEW = {"1-D", "1-D of 4, cut", "2-D", "branches", "branches' cores", "ring", "ulysses x 1-D", "slices"}
"""Layouts that run without --long; the others are combinations of these."""


def model_of(name: str, layout: dict[str, Any], fields: dict[str, Any] | None = None, **changes: Any) -> Config:
    layout = dict(layout)
    layers = 4 if "chunks" in layout.get("pipeline", {}) else 2
    micro = 2 if "pipeline" in layout or "data" in layout else 4
    shape = {"layers": layers, "hidden": 24, "vocabulary_multiple": 12, **SHAPES["qwen3-next"], "positions": 48}
    shape |= {"dropout": 0.0} | MODELS[name] | (fields or {})
    context = layout.pop("context", {})
    return config_for("qwen3-next", context, layout=layout, batch={"global": 8, "micro": micro}, model=shape, **changes)


@cache
def alone(name: str, documents: bool = False, layers: int = 2) -> Any:
    data = {"data": SEPARATE} if documents else {}
    return run(model_of(name, {}, {"layers": layers}, **data))[0]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in ALL])
def test_equals_serial(name: str) -> None:
    config = model_of("dense", ALL[name])
    check(run(config), alone("dense", layers=config.model.layers))


@pytest.mark.parametrize(
    "name",
    [
        "ring",
        "ulysses of 4",
        pytest.param("ring of 4 x replicas", marks=pytest.mark.long),
        pytest.param("1-D of 4, cut", marks=pytest.mark.long),
    ],
)
def test_documents_equal_serial(name: str) -> None:
    """A fifth of the tokens begins a document: before, in and at the first token of a rank's part."""
    check(run(model_of("dense", ALL[name], data=SEPARATE)), alone("dense", documents=True))


EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "experts x cut": {"data": {"size": 2, "expert": 2}, "tensor": CUT},
    "experts x stages x ring": {
        "data": {"size": 2, "expert": 2}, "pipeline": {"size": 2}, "context": {"size": 2, "kind": "ring"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["experts x cut", pytest.param("experts x stages x ring", marks=pytest.mark.long)])
def test_experts_equal_serial(name: str) -> None:
    check(run(model_of("experts", EXPERT_LAYOUTS[name])), alone("experts"))


@pytest.mark.parametrize("recompute", ["selective", pytest.param(1, marks=pytest.mark.long)])
def test_recomputation_sends_states_again(recompute: str | int) -> None:
    config = model_of("dense", LAYOUTS["ring"], memory={"recompute": recompute}, data=SEPARATE)
    check(run(config), alone("dense", documents=True))


@pytest.mark.long
def test_twenty_steps() -> None:
    layout = LAYOUTS["ring x cut x stages x replicas"]
    check(run(model_of("dense", layout, steps=20)), run(model_of("dense", {}, steps=20))[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_trains_as_on_one_device(level: str) -> None:
    precision = {"level": level, "dtype": "bf16"}
    expected, _ = run(model_of("experts", {}, precision=precision))[0]
    for losses, _ in run(model_of("experts", EXPERT_LAYOUTS["experts x cut"], precision=precision)):
        torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["ring", "1-D", "2-D"])
def test_verify_holds(layout: str) -> None:
    assert mw.verify(model_of("dense", LAYOUTS[layout], data=SEPARATE), steps=1).holds


def test_verify_holds_with_steps_of_matrices() -> None:
    """Taps and decays take a step for each element; weight decay applies to taps, and not to decays."""
    optimizer = {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "schedule": {"warmup": 0}}
    layout = {"data": {"size": 2, "sync": "zero1"}}
    assert mw.verify(model_of("dense", layout, optimizer=optimizer), steps=2).holds


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"linear_key_heads": 2}, {"layout": {"tensor": ONE_D | {"size": 4}}},
        "layout.tensor.size=4 does not divide model.linear_key_heads=2; valid: 1, 2",
    ),
    (
        {"linear_key_heads": 3}, {},
        "model.linear_key_heads=3 does not divide model.linear_value_heads=8; valid: 1, 2, 4, 8",
    ),
    ({"key_value_heads": 3}, {}, "model.key_value_heads=3 does not divide model.heads=8; valid: 1, 2, 4, 8"),
    ({"rotary_width": 3}, {}, "model.rotary_width=3 is odd, and rotary positions turn pairs"),
    ({"rotary_width": 8}, {}, "model.rotary_width=8 is more than model.head_width=6; valid: 6 or less"),
    ({"attention_layers": [True]}, {}, r"model.attention_layers=\[true\] gives every layer attention; valid: a patt"),
    ({"attention_layers": []}, {}, r"model.attention_layers=\[\] gives every layer a gated delta net; valid: a"),
    (
        {"attention_layers": [True, True, False]}, {},
        r"model.attention_layers=\[true, true, false\] has 3 layers, more than model.layers=2",
    ),
    (
        {"convolution": 8}, {"layout": {"context": {"size": 2, "kind": "ring"}}},
        "layout.context.size=2 cuts sequences into parts of 6, and model.convolution=8 reads more before; valid: 1, or",
    ),
    (
        {}, {"bits": {"kind": "layout-free", "sequence": 2}},
        "bits.sequence=2 cuts layers of a qwen3-next, whose states are sums over tokens without parts; valid: 1",
    ),
    (
        {}, {"layout": {"tensor": {"kind": "subgraph", "size": 2, "common": "one"}}},
        "layout.tensor.common=one gives the first rank all that branches share, and a norm of heads is shared",
    ),
]  # fmt: skip


@pytest.mark.parametrize("fields, changes, message", REFUSED)
def test_other_combinations_are_refused(fields: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    shape = {"layers": 2, "hidden": 24, "vocabulary_multiple": 12, **SHAPES["qwen3-next"], "positions": 48, **fields}
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": shape, "data": {"sequence": 24}, "batch": {"global": 8, "micro": 4}} | changes)
