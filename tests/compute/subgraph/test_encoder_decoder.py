"""The original Transformer and T5 compute one device's numbers under every layout, in float64; sources are padded.

Transformer: labels smoothed by default; T5: heads together wider than the hidden states.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.config import Config
from tests.oracle.run import check, run
from tests.oracle.tensor import BLOCKS, ONE_D, SEQUENCE, config_for

WHOLE = {"kind": "none"}


def subgraph(size: int, common: str, branch: str) -> dict[str, Any]:
    return {"kind": "subgraph", "size": size, "common": common, "branch": branch}


def laid_out(model: str, tensor: dict[str, Any], stages: int = 1, data: int = 1) -> Config:
    """Return a run of two layers; with stages four microbatches."""
    config = config_for(model, tensor, data, steps=3, batch={"global": 16, "micro": 4})
    layout = config.layout.model_dump() | {"pipeline": {"size": stages}}
    return Config.model_validate(config.model_dump(mode="json", by_alias=True) | {"layout": layout})


@cache
def serial(model: str) -> Any:
    return run(laid_out(model, WHOLE))[0]


CASES = [
    ("t5", SEQUENCE[0], 1, 1),
    ("t5", BLOCKS[1], 1, 1),
    ("t5", subgraph(2, "one", "block"), 1, 1),
    ("t5", subgraph(4, "all", "block"), 1, 1),
    ("t5", subgraph(4, "one", "attention-core"), 1, 1),
    ("t5", WHOLE, 2, 1),
    ("t5", subgraph(2, "all", "attention-core"), 4, 1),
    ("transformer", ONE_D[0], 1, 1),
    ("transformer", BLOCKS[1], 1, 1),
    ("transformer", subgraph(2, "all", "block"), 1, 1),
    ("transformer", subgraph(2, "one", "attention-core"), 1, 1),
    ("transformer", subgraph(2, "one", "attention"), 2, 1),
]

ONLY_LONG = [
    *[(model, subgraph(g, common, branch), 1, 1) for model in ("t5", "transformer") for g in (2, 4)
      for common in ("all", "one") for branch in ("attention-core", "attention", "block")],
    *[(model, tensor, 1, 2) for model in ("t5", "transformer") for tensor in (WHOLE, ONE_D[0], BLOCKS[2])],
    *[(model, WHOLE, stages, 1) for model in ("t5", "transformer") for stages in (3, 4)],
    ("t5", subgraph(2, "all", "block"), 2, 2),
    ("transformer", SEQUENCE[0], 1, 1),
    ("t5", ONE_D[0], 1, 1),
]  # fmt: skip


def label(case: tuple[str, dict[str, Any], int, int]) -> str:
    model, tensor, stages, data = case
    return "-".join(map(str, (model, *tensor.values(), f"pipe {stages}", f"data {data}")))


@pytest.mark.few
@pytest.mark.parametrize(
    "case",
    [*CASES, *[pytest.param(case, marks=pytest.mark.long) for case in ONLY_LONG if case not in CASES]],
    ids=label,
)
def test_equals_serial(case: tuple[str, dict[str, Any], int, int]) -> None:
    model, *rest = case
    check(run(laid_out(model, *rest)), serial(model))


def test_fully_sharded_equals_serial() -> None:
    """Weights are slices, gathered part by part of both chains."""
    config = laid_out("t5", WHOLE, data=2)
    layout = config.layout.model_dump() | {"data": {"size": 2, "sync": "zero3"}}
    check(run(Config.model_validate(config.model_dump(mode="json", by_alias=True) | {"layout": layout})), serial("t5"))
