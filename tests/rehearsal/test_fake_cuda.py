"""Every layout takes a step on a GPU that is not there: no operation mixes devices, and its costs are bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rehearsal.costs import Costs, costs
from tests.rehearsal.layouts import layouts, rehearse, runs_of

LAYOUTS = layouts()


@pytest.mark.parametrize("group", LAYOUTS)
def test_every_layout_takes_a_step(group: str, fake_gpu: Path) -> None:
    reports = rehearse(fake_gpu, runs_of(LAYOUTS[group]))
    failed = [f"{report.name}, rank {report.rank}:\n{report.error}" for report in reports if report.error]
    assert not failed, "\n".join(failed)
    for report in reports:
        waits = {why: number for why, number in report.tally["waits"].items() if FEW_LABELS not in why}
        assert sum(waits.values()) <= WAITS, f"{report.name}, rank {report.rank}: {waits}"


WAITS = 1
"""Times a step in which the host waits for the device: for the step before, whose numbers it reads."""
FEW_LABELS = "tensor/cross_entropy.py"
"""Where a head of few labels (BERT's) waits once a microbatch for their number, which spares it most of the logits."""

KERNELS = {"serial": 45, "zero1": 45, "megatron": 47, "sequence": 57, "tesseract": 109, "pipeline": 45}
"""Kernels a layer and microbatch, at most."""


@pytest.fixture(scope="module")
def steps(fake_gpu: Path) -> dict[str, Costs]:
    """GPT-2's layers as they are, in bf16, few rows: what a step costs in each layout."""
    return costs(fake_gpu, KERNELS, rows=2)


@pytest.mark.parametrize("layout", KERNELS)
def test_what_a_step_may_cost(layout: str, steps: dict[str, Costs]) -> None:
    cost = steps[layout]
    assert sum(cost.kernels.values()) <= KERNELS[layout], cost.kernels
    assert sum(cost.step["waits"].values()) <= WAITS, cost.step["waits"]
    assert "select_backward" not in cost.kernels
    assert cost.step["odd_products"] == {}, "dims that are no multiple of 8 take slow kernels"
    if layout != "tesseract":  # its norms' sums are float64
        assert cost.cast_bytes <= 0.01 * cost.moved_bytes.total(), "activations are copied to another dtype"
