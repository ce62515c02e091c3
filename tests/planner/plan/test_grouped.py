"""Plans of experts: one kernel for all experts' rows if a run has this kernel, else a product an expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.one_gpu_probes import EXPERTS
from meshwright.compute.model import Chunk
from meshwright.config import Config, parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.software import OWN_SOFTWARE, Software, load_program
from meshwright.planner.plan.timing import Timer
from meshwright.strategies.pipeline.task import TaskKind

ROOT = Path(__file__).resolve().parents[3]

COUNT, TAKEN, HIDDEN, INNER, ROWS = 8, 2, 64, 40, 2 * 16 * 2
"""Experts, experts a token, widths, and rows of a microbatch of two sequences of 16 tokens."""


def run_of(dtype: str = "bf16", inner: int = INNER, **changes: Any) -> Config:
    return parse_config({
        "model": {
            "family": "llama", "layers": 2, "hidden": HIDDEN, "heads": 4, "feed_forward": inner, "vocabulary": 264,
            "positions": 16, "experts": {"count": COUNT, "per_token": TAKEN},
        },
        "data": {"sequence": 16}, "batch": {"global": 4, "micro": 2}, "precision": {"level": "O2", "dtype": dtype},
        "compile": "none",
    } | changes)  # fmt: skip


def products(
    config: Config, task: TaskKind, cluster: str = "dgx-h100", software: Software = OWN_SOFTWARE
) -> list[Kernel]:
    """Return a layer's products of experts, by width: the products of all experts together, or of one expert."""
    recordings = Planner(load_cluster(cluster), software).recordings
    ends = recordings.of(config, Chunk(range(0), True, False), ())
    recording = recordings.of(config, Chunk(range(1), False, False), ends.outgoing)
    found = [event for event in recording.programs[task][-1].events if isinstance(event, Kernel)]
    sizes = {2.0 * rows * HIDDEN * INNER * width for rows in (ROWS, ROWS // COUNT) for width in (1, 2)}
    return [each for each in found if each.kind == "product" and each.flops in sizes]


def test_one_kernel_has_the_flops_and_the_bytes_of_all_experts() -> None:
    """tests/rehearsal/test_fake_cuda.py counts the same six a layer and microbatch in a run."""
    forward, backward = (products(run_of(), task) for task in (TaskKind.FORWARD, TaskKind.BACKWARD))
    assert [each.members for each in forward + backward] == [COUNT] * 6
    up, down = (2.0 * ROWS * HIDDEN * INNER * width for width in (2, 1))
    assert [each.flops for each in forward] == [up, down]
    assert sorted(each.flops for each in backward) == [down, down, up, up]
    for each in forward + backward:
        width = 2 if each.flops == up else 1
        assert each.touched_bytes == 2 * (ROWS * HIDDEN + COUNT * HIDDEN * INNER * width + ROWS * INNER * width) + (
            4 * COUNT  # the ends of rows
        )
        assert each.side**3 == pytest.approx(ROWS / COUNT * HIDDEN * INNER * width)


@pytest.mark.parametrize(
    "config, cluster",
    [
        (run_of(), "dgx-a100"), (run_of(), "l40s"), (run_of("fp16"), "dgx-h100"), (run_of(), "two-cores"),
        (run_of(bits="layout-free", layout={"tensor": {"kind": "megatron", "size": 1}}), "dgx-h100"),
    ],
    ids=["Ampere", "Ada", "fp16", "CPU", "equal bits"],
)  # fmt: skip
def test_elsewhere_each_expert_has_a_product(config: Config, cluster: str) -> None:
    forward = products(config, TaskKind.FORWARD, cluster)
    assert [each.members for each in forward] == [1] * 2 * COUNT


def test_places_that_the_kernel_does_not_take_are_no_places_of_a_plan_either() -> None:
    """Widths of 36 are 72 bytes, no multiple of 16."""
    config = run_of(inner=36)
    recordings = Planner(load_cluster("dgx-h100")).recordings
    ends = recordings.of(config, Chunk(range(0), True, False), ())
    recording = recordings.of(config, Chunk(range(1), False, False), ends.outgoing)
    assert not [
        event for event in recording.programs[TaskKind.FORWARD][-1].events
        if isinstance(event, Kernel) and event.kind == "product" and event.members == COUNT
    ]  # fmt: skip


def test_a_rank_of_an_expert_group_multiplies_its_own() -> None:
    layout = {"data": {"size": 2, "expert": 2, "sync": "zero1"}}
    config = run_of(layout=layout)
    assert [each.members for each in products(config, TaskKind.FORWARD)] == [COUNT // 2] * 2


def test_a_capacity_has_as_many_kernels() -> None:
    config = run_of()
    bounded = config.model.model_dump() | {"experts": {"count": COUNT, "per_token": TAKEN, "capacity": 1.0}}
    assert [each.members for each in products(run_of(model=bounded), TaskKind.FORWARD)] == [COUNT] * 2


def test_of_other_programs_a_preset_says_it() -> None:
    apart = load_program("megatron-core").software
    assert apart.experts == "apart"
    assert [each.members for each in products(run_of(), TaskKind.FORWARD, software=apart)] == [1] * 2 * COUNT
    together = load_program("torchtitan").software
    assert [each.members for each in products(run_of(), TaskKind.FORWARD, software=together)] == [COUNT] * 2


def test_many_experts_take_as_long_as_was_measured() -> None:
    """An H200's measured times of Qwen3-30B-A3B's expanding product on 8,192 tokens are met: all experts in one kernel
    to a tenth, a kernel for each expert to a fifth."""
    stages = json.loads((ROOT / "benchmarks/one_gpu.json").read_text())
    (measured,) = (each["found"] for each in stages if each["name"] == "grouped")
    name, count, taken, hidden, inner = EXPERTS[1]
    rows, columns = 8192 * taken, 2 * inner
    products, side = float(rows * hidden * columns), (rows * hidden * columns / count) ** (1 / 3)
    touched = 2 * (rows * hidden + count * hidden * columns + rows * columns)
    timer = Timer(load_cluster("dgx-h200"), 1)
    grouped = timer.kernel_seconds(Kernel("product", 2 * products, touched, 0, "bf16", side, members=count))
    assert grouped == pytest.approx(measured[name]["grouped_ms"] / 1e3, rel=0.1)
    one = timer.kernel_seconds(Kernel("product", 2 * products / count, touched // count, 0, "bf16", side))
    copy = timer.kernel_seconds(Kernel("element", 0.0, 2 * 2 * rows * columns, 0, "bf16"))
    assert count * one + copy == pytest.approx(measured[name]["one_each_ms"] / 1e3, rel=0.2)
