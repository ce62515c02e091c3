"""Gradients as slices: what is sent in each microbatch, and the most that is whole at any time."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.model import rows_of
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.data_parallel.test_equality import config_for, global_batch
from tests.harness import build, forward_and_backward
from tests.workers import run_ranks

MICRO = 2


def step(mesh: Mesh, sync: str) -> dict[str, Any]:
    """A step of three microbatches: what each phase sent, and the most bytes of gradients while it ran."""
    size = mesh.size("data")
    config = config_for(sync, size, batch={"global": 3 * MICRO * size, "micro": MICRO})
    parts = build(config, mesh)
    strategy = parts.strategy
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(bucket.gradients.untyped_storage().nbytes() for bucket in strategy.buckets))

    for parameter in parts.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    seen: dict[str, Any] = {"buckets": [bucket.gradients.numel() * 8 for bucket in strategy.buckets]}

    def record(phase: str) -> None:
        entries = {verb: (entry.calls, entry.sent_bytes) for (_, verb), entry in mesh.ledger.traffic.items()}
        seen[phase] = entries
        mesh.ledger.traffic.clear()

    mesh.ledger.traffic.clear()
    batch = rows_of(global_batch(config, 0), slice(0, config.replica_batch))
    for index in range(3):
        rows = rows_of(batch, slice(index * MICRO, (index + 1) * MICRO))
        forward_and_backward(parts, rows, {"labels": 1.0}, final=index == 2)
        record(f"microbatch {index}")
    strategy.finish()
    seen["left"] = sum(bucket.gradients.untyped_storage().nbytes() for bucket in strategy.buckets)
    strategy.publish()
    record("publish")
    return seen | {
        "most": most,
        "planned": strategy.gradient_bytes,
        "slices": sum(slot.parameter.grad.nbytes for slot in strategy.slots),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_zero2_sums_in_every_microbatch_and_holds_few_buckets(size: int) -> None:
    for seen in run_ranks(step, Grid((("data", size),)), "zero2"):
        buckets = seen["buckets"]
        assert len(buckets) > 3
        part = (size - 1) * sum(buckets) // size
        for index in range(3):
            assert seen[f"microbatch {index}"] == {"reduce_scatter": (len(buckets), part)}
        assert seen["publish"] == {"all_gather": (len(buckets), part)}
        assert seen["left"] == 0
        assert seen["slices"] == sum(buckets) // size
        assert 0 < seen["most"] <= seen["planned"] - seen["slices"]
        assert seen["planned"] - seen["slices"] < sum(buckets)
