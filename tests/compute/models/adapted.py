"""Small runs with adapters, and factors B other than zero: with B = 0 the gradients of A are zero."""

from __future__ import annotations

from typing import Any

from meshwright.config import Config
from tests.families.llama.layouts import llama
from tests.oracle.tensor import MODELS

RANK = {"rank": 4, "begin": "random"}


def adapted(layout: dict[str, Any], adapter: dict[str, Any] | None = None, **changes: Any) -> Config:
    shape = {"layers": 2, "hidden": 24, "vocabulary_multiple": 12, "dropout": 0.0, "positions": 48}
    model = MODELS["llama"] | shape | changes.pop("model", {})
    return llama(layout, model=model | {"adapter": RANK | (adapter or {})}, **changes)
