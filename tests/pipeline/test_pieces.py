"""Rows that travel to experts as messages: float64 gradients to 1e-12 of one device's, losses to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.context.test_equality import CUT, ONE_D
from tests.families.llama.test_experts_layouts import experts, serial
from tests.tensor.test_equality import check, run

MESSAGES = {"size": 2, "expert": 2, "exchange": "messages", "bucket": 8192}
RING = {"size": 2, "kind": "ring"}
V = {"size": 2, "chunks": 2, "placement": "v", "limit": 3}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage": {"data": MESSAGES},
    "stages": {"data": MESSAGES, "pipeline": {"size": 2}},
    "chunks in a loop": {"data": MESSAGES, "pipeline": {"size": 2, "chunks": 2, "partition": [0, 1, 1, 0]}},
    "chunks in a v": {"data": MESSAGES, "pipeline": V | {"partition": [1, 0, 1, 0]}},
    "cut layers": {"data": MESSAGES, "tensor": CUT},
    "1-D x stages": {"data": MESSAGES, "tensor": ONE_D, "pipeline": {"size": 2}},
    "ring x stages": {"data": MESSAGES, "context": RING, "pipeline": {"size": 2}},
    "replicas": {"data": MESSAGES | {"size": 4, "sync": "zero1"}},
    "replicas x stages": {"data": MESSAGES | {"size": 4, "sync": "ring"}, "pipeline": {"size": 2}},
}
IN_CI = {"one stage", "stages", "cut layers", "replicas"}


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_equals_serial(name: str) -> None:
    check(run(experts(LAYOUTS[name], batch={"global": 8, "micro": 1})), serial())
