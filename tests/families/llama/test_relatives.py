"""Llama's relatives under every axis compute what one device computes: float64 gradients to 1e-12 relative."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import meshwright as mw
from meshwright.config import Config
from meshwright.families.llama.section import Llama
from tests.families.llama.layouts import LAYOUTS, llama
from tests.oracle.run import check, run
from tests.oracle.tensor import MODELS

RELATIVES: dict[str, dict[str, Any]] = {
    "windows": {"window": 7, "window_layers": [True, False], "head_norms": False},
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
"""Layouts that run without --long; the others show combinations of these."""


@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize(
    "layout", [layout if layout in FEW else pytest.param(layout, marks=pytest.mark.long) for layout in LAYOUTS]
)
def test_equals_serial(layout: str, name: str) -> None:
    check(run(relative(name, LAYOUTS[layout])), alone(name))


CHANGES = [
    (name, field)
    for name, fields in RELATIVES.items()
    for field, value in fields.items()
    if value != Llama.model_fields[field].default and field != "window"  # without a window there are no layers with one
]


@pytest.mark.parametrize("name, field", CHANGES)
def test_each_field_has_an_effect(name: str, field: str) -> None:
    changed = shape(name) | {field: Llama.model_fields[field].default}
    assert run(llama({}, steps=1, model=changed))[0][0] != alone(name)[0][:1]


@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize("layout", ["ring", "1-D"])
def test_verify_holds(name: str, layout: str) -> None:
    config = relative(name, LAYOUTS[layout], data={"sequence": 24, "documents": "separate"})
    assert mw.verify(config, steps=1).holds
