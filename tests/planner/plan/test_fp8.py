"""Plans of runs in FP8: recordings, costs, and the least width with a gain."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from meshwright.compute.model import Chunk
from meshwright.config import Config, parse_config
from meshwright.config.section import with_field
from meshwright.planner.plan.answer import changes
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.fp8 import FIELD, in_other_format, seconds_of_linear, width_sentence
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.recordings import Recordings
from meshwright.planner.plan.search import search
from meshwright.planner.plan.software import OWN_SOFTWARE, Software
from meshwright.planner.plan.timing import Timer
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.pipeline.task import TaskKind

HOPPER = load_cluster("dgx-h100")


def run_of(hidden: int, products: str = "fp8", **changes: Any) -> Config:
    return parse_config({
        "model": {
            "family": "llama", "layers": 8, "hidden": hidden, "heads": hidden // 64, "feed_forward": 4 * hidden,
            "vocabulary": 32000, "positions": 1024,
        },
        "data": {"sequence": 1024}, "batch": {"global": 16, "micro": 16},
        "precision": {"level": "O2", "dtype": "bf16", "products": products},
    } | changes)  # fmt: skip


def kernels(
    config: Config, layer: int, task: TaskKind, kind: str = "cuda", software: Software = OWN_SOFTWARE
) -> list[Kernel]:
    recordings = Recordings(kind, software)
    ends = recordings.of(config, Chunk(range(0), True, False), ())
    recording = recordings.of(config, Chunk(range(layer, layer + 1), False, False), ends.outgoing)
    return [event for event in recording.programs[task][-1].events if isinstance(event, Kernel)]


def products_in(found: list[Kernel]) -> Counter[str]:
    """Count linears' products by dtype, without attention's batched products."""
    return Counter(each.dtype for each in found if each.kind == "product" and each.members == 1)


def test_inner_layers_have_two_products_of_three_in_fp8() -> None:
    config = run_of(512, compile="none")
    forward, backward = (kernels(config, 1, task) for task in (TaskKind.FORWARD, TaskKind.BACKWARD))
    assert products_in(forward) == {"fp8": 4}
    assert products_in(backward) == {"fp8": 4, "bf16": 4}
    assert sum(each.kind == "cast" for each in forward + backward) == 2 * 2 * 4
    stored = with_field(config, FIELD, "stored")
    assert sum(each.flops for each in forward) == sum(each.flops for each in kernels(stored, 1, TaskKind.FORWARD))


@pytest.mark.parametrize("fused", [False, True])
def test_casts_that_are_fused_cost_their_writes(fused: bool) -> None:
    """The bytes of all kernels except products, in FP8 less in bf16, are the casts'; scales add at most a hundredth."""
    rows, hidden = 16 * 1024, 512
    software = Software(fuses_elements=fused)
    found = {}
    for task in (TaskKind.FORWARD, TaskKind.BACKWARD):
        low, half = (
            sum(
                each.touched_bytes
                for each in kernels(run_of(hidden, products), 1, task, software=software)
                if each.kind != "product"
            )
            for products in ("fp8", "stored")
        )
        found[task] = low - half
    weights = hidden * (3 + 1 + 2 * 4 + 4) * hidden
    inputs, gradients = (1 + 1 + 1 + 4) * hidden, (3 + 1 + 2 * 4 + 1) * hidden
    if fused:  # a weight is read twice for scales of columns; the layer's dy is of another part, and is read
        expected = {
            TaskKind.FORWARD: rows * inputs + 5 * weights,
            TaskKind.BACKWARD: rows * (gradients + 2 * hidden) + 3 * weights,
        }
    else:
        expected = {
            TaskKind.FORWARD: 5 * (rows * inputs + weights), TaskKind.BACKWARD: 5 * (rows * gradients + weights)
        }  # fmt: skip
    for task, touched in expected.items():
        assert 0 <= found[task] - touched < 0.01 * touched + 2 * rows * 20, task


def test_a_search_plans_runs_in_fp8() -> None:
    """Estimates remember partitions by the layers that stay in half precision."""
    found = search(run_of(1024), HOPPER, 2, fixed=["layout.pipeline.size"], top=1)
    assert found.predictions[0].config.precision.in_fp8


def test_the_first_and_the_last_layer_share_a_recording() -> None:
    config = run_of(512)
    assert Recordings("cuda").outline(config).alike == (0, 1, 1, 1, 1, 1, 1, 0)
    assert Recordings("cuda").outline(with_field(config, FIELD, "stored")).alike == (0,) * 8
    for layer in (0, 7):
        assert products_in(kernels(config, layer, TaskKind.FORWARD)) == {"bf16": 4}


def test_a_cpu_is_planned_with_its_casts() -> None:
    assert products_in(kernels(run_of(512), 1, TaskKind.FORWARD, "cpu")) == {"float32": 4}


def test_a_linear_costs_what_its_recorded_kernels_cost() -> None:
    config, timer = run_of(1024), Timer(HOPPER, 1)
    rows = config.micro * 1024
    weight = 1024 * 4 * 1024
    side = float(rows * weight) ** (1 / 3)
    contract = [
        each
        for task in (TaskKind.FORWARD, TaskKind.BACKWARD)
        for each in kernels(config, 1, task)
        if each.kind == "product" and each.dtype == "fp8" and each.side == pytest.approx(side)
    ]
    assert len(contract) == 2
    flat = seconds_of_linear(timer, rows, 1024, "fp8", fused=False)
    assert sum(map(timer.kernel_seconds, contract)) < flat < 2 * sum(map(timer.kernel_seconds, contract))


@pytest.mark.parametrize("compiles", ["none", "blocks"])
def test_wide_models_gain_by_it_and_narrow_ones_only_inside_of_graphs(compiles: str) -> None:
    shares = {}
    for hidden in (768, 4096):
        low, half = (
            Planner(HOPPER).predict(run_of(hidden, products, compile=compiles)) for products in ("fp8", "stored")
        )
        assert low.flops == half.flops
        shares[hidden] = low.seconds / half.seconds
    assert shares[4096] < 0.97
    assert (shares[768] < 1.0) is (compiles == "blocks")


def test_the_width_from_which_it_pays() -> None:
    timer = Timer(HOPPER, 1)
    least: dict[bool, int] = {}
    for fused in (False, True):
        said = re.search(r"K = ([\d,]+) on\.$", width_sentence(timer, 16 * 1024, fused=fused))
        assert said is not None
        least[fused] = int(said[1].replace(",", ""))
        for width, pays in ((least[fused] - 256, False), (least[fused], True)):
            low, half = (seconds_of_linear(timer, 16 * 1024, width, dtype, fused=fused) for dtype in ("fp8", "bf16"))
            assert (low < half) is pays
    assert 768 < least[False] <= 2048
    assert least[True] < least[False]
    slow = HOPPER.device.model_copy(update={"peak_flops_per_second": {"bf16": 1e15, "fp8": 1e15}})
    timer = Timer(HOPPER.model_copy(update={"device": slow}), 1)
    assert width_sentence(timer, 16 * 1024, fused=True).endswith("in none.")


def test_the_answer_has_the_step_in_the_other_format() -> None:
    models = Estimates(Planner(HOPPER))
    for products, other in (("fp8", "stored"), ("stored", "fp8")):
        best = models.planner.predict(run_of(512, products))
        *_, change = changes(best, models)
        assert change.what == f"precision.products={other}"
        assert change.seconds == pytest.approx(Planner(HOPPER).predict(run_of(512, other)).seconds)
    two_layers = run_of(512, "stored", model=run_of(512).model.model_dump() | {"layers": 2})
    assert in_other_format(two_layers, HOPPER) is None
    assert in_other_format(run_of(512), load_cluster("dgx-a100")) is None


def test_a_device_without_a_peak_of_fp8_is_refused() -> None:
    rule = r"precision\.products=fp8 is no dtype of which dgx-a100 says how fast it multiplies .* capability 8\.9 on"
    with pytest.raises(ConfigError, match=rule):
        Planner(load_cluster("dgx-a100")).predict(run_of(512))
