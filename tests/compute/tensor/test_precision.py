"""bf16 under every kit follows float32 on one device; a kit's ranks agree on the step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracle.run import run
from tests.oracle.tensor import config_for

STEPS = 10
TOLERANCE = 0.02
"""Relative, of losses near 6; bf16 has 8 bits. Serial bf16 has the same distance from float32."""


def losses(tensor: dict[str, Any], level: str, dtype: str) -> list[float]:
    optimizer = {"lr": 3e-3, "clip": 1.0}
    config = config_for("gpt2", tensor, precision={"level": level, "dtype": dtype}, steps=STEPS, optimizer=optimizer)
    results = run(config)
    assert all(mine == results[0][0] for mine, _ in results)
    return results[0][0]


@pytest.fixture(scope="module")
def float32() -> list[float]:
    return losses({"kind": "none"}, "O0", "float32")


@pytest.mark.diagonal
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "tensor",
    [
        {"kind": "megatron", "size": 2},
        {"kind": "megatron", "size": 2, "sequence_parallel": True},
        {"kind": "tesseract", "q": 2, "d": 1},
        pytest.param({"kind": "tesseract", "q": 2, "d": 2}, marks=pytest.mark.long, id="tesseract-2-2"),
        {"kind": "subgraph", "size": 2, "common": "all", "branch": "attention-core"},
        {"kind": "subgraph", "size": 2, "common": "one", "branch": "block"},
    ],
    ids=lambda tensor: "-".join(map(str, tensor.values())),
)
def test_losses_follow_float32(tensor: dict[str, Any], level: str, float32: list[float]) -> None:
    mine = losses(tensor, level, "bf16")
    assert mine == pytest.approx(float32, rel=TOLERANCE)
    assert mine != float32
