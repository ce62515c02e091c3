"""The planner counts what runs on pairs of answers do: the head's two passes, both rows, and sums over shared
sequences."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.compute.models.chain import chain_of
from tests.compute.models.preferring import preferring
from tests.families.llama.layouts import RING
from tests.oracle.context import BLOCKS, CUT
from tests.planner.plan.checked import check

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"data": {"size": 2, "sync": "zero1"}},
    "cut": {"tensor": CUT},
    "ring": {"context": RING},
    "1f1b": {"pipeline": {"size": 2, "schedule": "1f1b"}},
    "2-D": {"tensor": BLOCKS},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "ring" else pytest.mark.long) for n in LAYOUTS])
def test_bytes_are_those_of_runs(name: str) -> None:
    check([preferring({**LAYOUTS[name], "transport": "torch"})])


def test_a_sample_is_two_rows() -> None:
    pairs = preferring({})
    texts = pairs.model_copy(update={"loss": None})
    ours, plain = chain_of(pairs), chain_of(texts)
    assert ours.tokens_per_sample(pairs) == 2 * plain.tokens_per_sample(texts) == 48
    assert ours.flops_per_sample(pairs) == 2 * plain.flops_per_sample(texts)
