"""Planted mistakes are found, at their modules and of their kinds; right programs are not disturbed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.parity import names_it, run_cases, settings
from meshwright.launch import Ranks, run
from meshwright.parity.check import ParityCheck, judged

CASES = {name: (setting, mistake) for name, setting, mistake in settings()}
TENSOR = (("tp", 2),)
FEW = ["g-missing@blocks.0.attention.out", "f-missing@blocks.1.feed_forward.up", "same-slice", "sequence-no-norms",
       "clip-local", "dropout", "right-17", "right-20", "right-22"]  # fmt: skip
MANY = {
    axes: [name for name, (setting, _) in CASES.items() if setting.axes == axes] for axes in (TENSOR, (("data", 2),))
}


def check_cases(names: list[str], axes: tuple[tuple[str, int], ...], precision: str, folder: Path) -> None:
    run(run_cases, Ranks(axes), names=names, precisions=[precision], out=folder)
    for name in names:
        check = ParityCheck(name, Path(__file__), axes, precision)
        result = judged(check, precision, folder / f"{name}-{precision}", time.monotonic())
        _, mistake = CASES[name]
        if mistake is None:
            assert result.holds, result.verdict
        else:
            assert result.finding is not None, f"{name} is not seen"
            assert names_it(result, mistake), result.verdict
            assert result.finding.kind in mistake.kinds, result.verdict


def test_some_on_two_tensor_ranks(tmp_path: Path) -> None:
    check_cases(FEW, TENSOR, "float64", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("axes", MANY, ids=str)
def test_all_on_two_ranks(axes: tuple[tuple[str, int], ...], tmp_path: Path) -> None:
    check_cases(MANY[axes], axes, "float64", tmp_path)
