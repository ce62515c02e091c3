"""Every tensor kit computes one device's numbers: float64 gradients to 1e-12 relative, losses to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracle.run import check, run
from tests.oracle.tensor import ALL, BLOCKS, CASES, FEW, LONG, SHORT, config_for, serial

ONLY_LONG = [
    ("gpt2", ALL[-1], 2, SHORT),  # 36 ranks
    *[(model, tensor, 2, SHORT) for model in ("bert", "vit") for tensor in FEW + [BLOCKS[2]]],
]
"""Cases that wait for --long: the largest number of ranks, and cases that GPT-2 covers as well."""


def label(case: tuple[str, dict[str, Any], int, int]) -> str:
    model, tensor, data, steps = case
    return "-".join(map(str, (model, *tensor.values(), f"x{data}", f"{steps} steps")))


def is_alike(case: tuple[str, dict[str, Any], int, int]) -> bool:
    """Return whether a case waits for --long: GPT-2 on one replica has every layout, other cases have the layouts in
    FEW."""
    model, tensor, data, _ = case
    return case in ONLY_LONG or ((model, data) != ("gpt2", 1) and tensor not in FEW)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if is_alike(case) else ()) for case in [*CASES, *ONLY_LONG]],
    ids=label,
)
def test_equals_serial(case: tuple[str, dict[str, Any], int, int], request: pytest.FixtureRequest) -> None:
    model, tensor, data, steps = case
    steps = LONG if request.config.getoption("--long") else steps
    check(run(config_for(model, tensor, data, steps=steps)), serial(model))


@pytest.mark.parametrize("summa", ["gather", "stream"])
def test_a_whole_model_in_each_form(summa: str) -> None:
    check(run(config_for("gpt2", BLOCKS[1], steps=SHORT, memory={"summa": summa})), serial("gpt2"))
