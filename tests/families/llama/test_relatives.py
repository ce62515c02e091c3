"""Llama's relatives under every axis equal one device: float64 gradients to 1e-12 relative."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import meshwright as mw
from meshwright.config import Config, parse_config
from meshwright.config.registry import entries
from tests.compute.bits.runs import ended
from tests.families.llama.layouts import LAYOUTS, llama
from tests.oracle.run import check, run
from tests.oracle.tensor import MODELS

RELATIVES: dict[str, dict[str, Any]] = {
    "windows": {"window": 7, "window_layers": [True, False], "head_norms": False},
    "olmo3": {
        "norms": "behind",
        "whole_norms": True,
        "head_norms": False,
        "window": 7,
        "window_layers": [True, False],
        "window_rope": {"theta": 50.0},
    },
    "gemma": {
        "family": "gemma",
        "head_norms": True,
        "query_scalar": 11,
        "score_cap": 0.5,
        "logit_cap": 0.3,
        "window": 7,
        "window_layers": [True, False],
        "window_rope": {"theta": 50.0},
    },
    "phi": {"family": "phi", "window": 7, "head_norms": False},
    "smollm3": {"rotary_layers": [True, False], "head_norms": False, "tied": True},
}
"""Fields of models with the shape of the oracle's Llama."""


def relative(name: str, layout: dict[str, Any], **changes: Any) -> Config:
    return llama(layout, model=shape(name), **changes)


def shape(name: str) -> dict[str, Any]:
    return {
        "layers": 2, "hidden": 24, "vocabulary_multiple": 12, **MODELS["llama"], "positions": 48, "dropout": 0.0,
        **RELATIVES[name],
    }  # fmt: skip


@cache
def alone(name: str) -> Any:
    return run(relative(name, {}))[0]


FEW = {"1-D", "2-D", "branches", "ulysses", "ring x cut x stages x replicas", "ring of 4 x replicas", "slices"}
"""Layouts that run without --long; the others are combinations of these."""


@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize(
    "layout", [layout if layout in FEW else pytest.param(layout, marks=pytest.mark.long) for layout in LAYOUTS]
)
def test_equals_serial(layout: str, name: str) -> None:
    check(run(relative(name, LAYOUTS[layout])), alone(name))


def usual(name: str, field: str) -> Any:
    """Return a field's default."""
    return entries("models")[shape(name)["family"]].model_fields[field].default


CHANGES = [
    (name, field)
    for name, fields in RELATIVES.items()
    for field, value in fields.items()
    if field not in ("family", "window") and value != usual(name, field)  # a layer with a window needs the window
]


@pytest.mark.parametrize("name, field", CHANGES)
def test_each_field_has_an_effect(name: str, field: str) -> None:
    changed = shape(name) | {field: usual(name, field)}
    assert run(llama({}, steps=1, model=changed))[0][0] != alone(name)[0][:1]


@pytest.mark.diagonal
@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize("layout", ["ring", "1-D"])
def test_verify_holds(name: str, layout: str) -> None:
    config = relative(name, LAYOUTS[layout], data={"sequence": 24, "documents": "separate"})
    assert mw.verify(config, steps=1).holds


BITS = {"tensor": 2, "hidden": 2, "sequence": 4, "attention": "runs"}
EQUAL: dict[str, list[tuple[str, ...]]] = {
    "uncut": [("layout.data=2", "layout.data.sync=zero2"), ("layout.pipeline=2", "batch.micro=1")],
    "cut": [
        ("layout.tensor=megatron", "layout.tensor.size=2", "layout.data=2"),
        ("layout.context=2", "layout.context.kind=ring"),
        ("layout.tensor=tesseract", "layout.tensor.q=2", "batch.micro=2"),
    ],
}
"""Layouts that end with the bits of one device, without cuts and with cuts."""
WIDE = {"hidden": 64, "heads": 8, "key_value_heads": 4, "head_width": 8, "feed_forward": 256, "vocabulary": 301}


def with_bits(name: str, cut: bool, words: tuple[str, ...] = ()) -> Config:
    tree: dict[str, Any] = {
        "model": shape(name) | WIDE | {"vocabulary_multiple": 64},
        "data": {"sequence": 32},
        "batch": {"global": 4, "micro": 2},
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "steps": 2,
        "bits": {"kind": "layout-free"} | (BITS if cut else {}),
    }
    if shape(name).get("norms") == "behind":
        # A norm divides by the small outputs of first weights; gradients of biases before it exceed the range of sums.
        tree["model"]["biases"] = ["query-key-value"]
    return parse_config(tree, words)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize("kind, words", [(kind, words) for kind, layouts in EQUAL.items() for words in layouts])
def test_layouts_end_with_equal_bits(name: str, kind: str, words: tuple[str, ...]) -> None:
    cut = kind == "cut"
    assert ended(with_bits(name, cut, words)).differing(ended(with_bits(name, cut))) == []
