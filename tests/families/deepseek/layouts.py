"""Configs of DeepSeek under layouts, and the serial reference."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.config import Config
from tests.oracle.context import config_for
from tests.oracle.run import run
from tests.oracle.tensor import MODELS

RING, ULYSSES = ({"size": 2, "kind": kind} for kind in ("ring", "ulysses"))

SHAPE: dict[str, Any] = MODELS["deepseek"] | {"layers": 2, "hidden": 24, "vocabulary_multiple": 12, "positions": 48}

DENSE = SHAPE | {"experts": None, "heads": 4}

# The one layer has experts, so no layer is dense.
LATER = SHAPE | {"layers": 1, "later_tokens": 2, "experts": SHAPE["experts"] | {"dense_layers": 0}}


def deepseek(model: dict[str, Any], layout: dict[str, Any], **changes: Any) -> Config:
    layout = dict(layout)
    micro = 2 if "pipeline" in layout or "data" in layout else 4
    settings = {"model": model, "layout": layout, "batch": {"global": 8, "micro": micro}} | changes
    return config_for("deepseek", layout.pop("context", {}), **settings)


@cache
def serial(name: str) -> Any:
    """Return the losses and gradients of one device."""
    return run(
        deepseek({"dense": DENSE, "routed": SHAPE, "later": LATER, "later of 3": LATER | {"layers": 3}}[name], {})
    )[0]
