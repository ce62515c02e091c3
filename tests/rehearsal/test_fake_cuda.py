"""Every layout takes a step on a fake GPU: no operation mixes devices, and the costs are bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshwright.config import Config
from tests.rehearsal.costs import EXPERTS, config_of, costs
from tests.rehearsal.costs import LAYOUTS as LAYOUTS_OF_COSTS
from tests.rehearsal.layouts import ALIKE, layouts, runs_of
from tests.rehearsal.step import FakeGpu

LAYOUTS = [
    pytest.param(name, config, marks=pytest.mark.long if group == ALIKE else (), id=f"{group}: {name}")
    for group, configs in layouts().items()
    for name, config in configs.items()
]


@pytest.mark.few
@pytest.mark.parametrize("name, config", LAYOUTS)
def test_every_layout_takes_a_step(
    name: str, config: Config, fake_gpu: FakeGpu, request: pytest.FixtureRequest
) -> None:
    for report in fake_gpu.rehearse(runs_of({name: config}, ends=request.config.getoption("--long"))):
        assert not report.error, f"rank {report.rank}:\n{report.error}"
        waits = {why: number for why, number in report.tally["waits"].items() if FEW_LABELS not in why}
        assert sum(waits.values()) <= WAITS, f"rank {report.rank}: {waits}"


WAITS = 1
"""Waits of the host for the device in a step: one, for the numbers of the step before."""
FEW_LABELS = "tensor/cross_entropy.py"
"""A head of few labels (BERT's) waits in this file once a microbatch for the number of labels, and skips most
logits."""

KERNELS = {"serial": 45, "zero1": 45, "megatron": 47, "sequence": 57, "tesseract": 99, "pipeline": 45}
"""Kernels a layer and microbatch, at most."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.long if name != "serial" else ()) for name in KERNELS],
)
def test_what_a_step_may_cost(layout: str, fake_gpu: FakeGpu) -> None:
    """GPT-2's layers are unchanged, in bf16, with few rows."""
    cost = costs(fake_gpu, [layout], rows=2)[layout]
    assert sum(cost.kernels.values()) <= KERNELS[layout], cost.kernels
    assert sum(cost.step["waits"].values()) <= WAITS, cost.step["waits"]
    assert not +Counter(cost.step["drains"]), "the host waits until the device has nothing left to do"
    assert "select_backward" not in cost.kernels
    assert cost.step["odd_products"] == {}, "dims that are no multiple of 8 take slow kernels"
    if layout != "tesseract":  # tesseract's norms sum in float64
        assert cost.cast_bytes <= 0.01 * cost.moved_bytes.total(), "activations are copied to another dtype"


@pytest.mark.parametrize("layout, rows, waits", [("serial", 2, WAITS), ("experts", 256, 4)])
def test_experts_are_multiplied_at_once_and_sorted_on_the_device(
    layout: str, rows: int, waits: int, fake_gpu: FakeGpu
) -> None:
    """There are two products of all experts, each with two gradients, for 2 layers and microbatches; no host is in a
    router's path. Ranks that exchange rows wait once each for the sizes of messages: here 2^20 rows, the fake device's
    answer."""
    config = config_of(LAYOUTS_OF_COSTS[layout], 2, 2, rows, EXPERTS)
    report = fake_gpu.rehearse(runs_of({layout: config}, 2))[-1]
    assert not report.error, report.error
    assert report.tally["kernels"]["_grouped_mm"] == 3 * 2 * 2 * 2
    assert report.tally["kernels"]["mm"] < 1000, "a product an expert"
    assert sum(report.tally["waits"].values()) == waits, report.tally["waits"]


def test_an_evaluation_drains_the_device_once(fake_gpu: FakeGpu) -> None:
    """The wait is after all sums are on the device."""
    (run,) = runs_of({"evaluated": config_of({}, 2, 2, 2)})
    (report,) = fake_gpu.rehearse([replace(run, evaluated=3)])
    assert not report.error, report.error
    assert sum(report.tally["waits"].values()) == 1, report.tally["waits"]


def test_a_checkpoint_is_copied_while_the_host_goes_on(fake_gpu: FakeGpu) -> None:
    """The second checkpoint finds the memory pinned."""
    (run,) = runs_of({"staged": config_of({}, 2, 2, 2)})
    (report,) = fake_gpu.rehearse([replace(run, staged=True)])
    assert not report.error, report.error
    assert not report.tally["waits"]
    assert report.tally["kernels"]["copy_"] > 0


OPTIMIZERS: list[dict[str, Any]] = [  # torch's fused SGD has no kernel for fake tensors
    {"optimizer": {"name": "adamw"}}, {"optimizer": {"name": "muon"}}, {"memory": {"offload": {"to": "host"}}},
]  # fmt: skip


@pytest.mark.parametrize("changes", OPTIMIZERS, ids=str)
def test_an_optimizer_keeps_the_device_busy(changes: dict[str, Any], fake_gpu: FakeGpu) -> None:
    """While the device has passes to do, the host reads the step before, and no number of this step."""
    (report,) = fake_gpu.rehearse(runs_of({str(changes): config_of({}, 2, 2, 2, **changes)}, 2))
    assert not report.error, report.error
    assert list(report.tally["waits"].values()) == [WAITS], report.tally["waits"]
    assert not +Counter(report.tally["drains"]), report.tally["drains"]
    if changes == OPTIMIZERS[0]:
        assert report.tally["kernels"]["full"] == 2, "a call for weights that decay, one for others"
