"""The fixed cases of layouts, numbered and marked."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import pytest

from tests.fuzz.__main__ import COVERING, HERE
from tests.fuzz.axes import TENSORS, Case, read_cases
from tests.fuzz.draw import few_of

FIXED, MORE = read_cases(COVERING), read_cases(HERE / "more.jsonl")
"""The fixed set, and runs of earlier fixed sets, which CI replaces by the fixed set."""

PAIRED = [("kind", "sync"), ("kind", "model"), ("kind", "schedule"), ("kind", "recompute"), ("sync", "offload")]
"""The pairs of axes with values that meet without --long; `kind`: a tensor layout's kind, at any size."""

LATE, MEETS = ("documents", "head", "loss", "late model"), ("kind", "context", "data")
"""Axes that are newer than the fixed set, and the axes with values that the newer axes meet without --long."""

LATE_MODELS = ("gpt-oss", "qwen3-next", "qwen3.5-experts")
"""Models that are newer than the fixed set; `late model`: one of these models, or None."""


def few() -> set[int]:
    """Return the numbers of the fixed cases that run without --long.

    All pairs of values took five times as long. Every plant of tests/plants is found by the few cases from before the
    late axes, which stay unchanged.
    """
    models = [case["model"] if case["model"] in LATE_MODELS else None for case in FIXED]
    cases = [
        case | {"kind": TENSORS[case["tensor"]]["kind"], "late model": model}
        for case, model in zip(FIXED, models, strict=True)
    ]
    late = [number for number, case in enumerate(cases) if any(case[axis] for axis in LATE)]
    early = [number for number in range(len(cases)) if number not in late]
    others = {"stages": 1, "tensor": "none", "vocabulary": "whole"}  # these values need not be covered again
    shown = [{axis: cases[number][axis] for axis in (*LATE, *MEETS)} | others for number in late]
    chosen = {early[at] for at in few_of([cases[number] for number in early], PAIRED)}
    return chosen | {late[at] for at in few_of(shown, list(product(LATE, MEETS)))}


def label(case: Case) -> str:
    """Return the case's main values."""
    told = ("model", "precision", "data", "sync", "stages", "schedule", "tensor", "context", "common", "branch")
    return "-".join(f"{case[axis]}" for axis in told if case[axis] is not None)


def numbered(cases: list[Case], few: Collection[int]) -> pytest.MarkDecorator:
    """Return a mark with the cases and ids; a case with a number not among the few is long."""
    marked = [
        pytest.param(case, id=f"{n}-{label(case)}", marks=() if n in few else pytest.mark.long)
        for n, case in enumerate(cases)
    ]
    return pytest.mark.parametrize("case", marked)
