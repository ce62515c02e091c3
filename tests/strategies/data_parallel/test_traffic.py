"""Each sync's sends, phase by phase, against the formulas of the sync's page. S: the bytes of the padded buckets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.compute.model import rows_of
from meshwright.config import parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.assembly import bucket_bytes
from tests.harness import build, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.workers import run_ranks

SYNCS = ("server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1")
MICRO = 2
INT64 = 8

Entries = dict[str, tuple[int, int]]
"""(calls, sent bytes) by verb."""


def measure(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Run one step of three or more microbatches with every sync, and return each phase's sends."""
    return {sync: _measure(mesh, sync) for sync in SYNCS}


def _measure(mesh: Mesh, sync: str) -> dict[str, Any]:
    size = mesh.size("data")
    config = config_for(sync, size, batch={"global": 3 * MICRO * size, "micro": MICRO})
    parts = build(config, mesh)
    everyone = global_batch(config, 0)
    phases: dict[str, Any] = {"buckets": [bucket.values.nbytes for bucket in parts.strategy.buckets]}

    def record(phase: str) -> None:
        entries = {verb: (entry.calls, entry.sent_bytes) for (_, verb), entry in mesh.ledger.traffic.items()}
        phases[phase] = entries
        mesh.ledger.traffic.clear()

    mesh.ledger.traffic.clear()
    batch = parts.strategy.share(
        lambda first, count: rows_of(everyone, slice(first, first + count)), config.replica_batch
    )
    record("share")
    for index in range(config.num_microbatches):
        rows = slice(index * MICRO, (index + 1) * MICRO)
        final = index == config.num_microbatches - 1
        forward_and_backward(parts, rows_of(batch, rows), {"labels": 1.0}, final=final)
        if final:
            parts.strategy.finish()
        record(f"backward {index}")
    parts.optimizer.step(0)
    record("step")
    parts.strategy.publish()
    record("publish")
    phases["hidden"] = MICRO * config.data.sequence * config.model.hidden * 8  # a microbatch's [B, T, H] in float64
    phases["labels"] = MICRO * config.data.sequence * INT64
    return phases


@cache
def measured(size: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(measure, Grid((("data", size),)))


@pytest.fixture(params=[2, 3, 4])
def size(request: pytest.FixtureRequest) -> int:
    chosen: int = request.param
    return chosen


def phases_of(sync: str, size: int) -> list[dict[str, Any]]:
    """Return the phases by rank."""
    return [rank[sync] for rank in measured(size)]


def test_allreduce(size: int) -> None:
    for phases in phases_of("allreduce", size):
        buckets = phases["buckets"]
        assert len(buckets) > 3
        assert phases["backward 2"] == {"all_reduce": (len(buckets), sum(2 * (size - 1) * b // size for b in buckets))}
        assert phases["share"] == phases["step"] == phases["publish"] == {}


def test_ring(size: int) -> None:
    for phases in phases_of("ring", size):
        buckets = phases["buckets"]
        messages = 2 * (size - 1) * len(buckets)
        assert all(bucket % size == 0 for bucket in buckets)
        assert phases["backward 2"] == {"send": (messages, 2 * (size - 1) * sum(buckets) // size)}
        assert phases["share"] == phases["step"] == phases["publish"] == {}


def test_rooted(size: int) -> None:
    for rank, phases in enumerate(phases_of("rooted", size)):
        num, total = len(phases["buckets"]), sum(phases["buckets"])
        worker, root = (
            {"gather": (num, total), "broadcast": (num, 0)},
            {"gather": (num, 0), "broadcast": (num, (size - 1) * total)},
        )
        assert phases["backward 2"] == (root if rank == 0 else worker)
        assert phases["share"] == phases["step"] == phases["publish"] == {}


@pytest.mark.parametrize("sync", ["server-gradient", "server-loss"])
def test_server(sync: str, size: int) -> None:
    for rank, phases in enumerate(phases_of(sync, size)):
        num, total = len(phases["buckets"]), sum(phases["buckets"])
        batch = 2 * 3 * phases["labels"]  # a replica's tokens and labels
        gradients = {"reduce": (num, 0 if rank == 0 else total)}
        assert phases["share"] == {"scatter": (2, (size - 1) * batch if rank == 0 else 0)}
        assert phases["publish"] == {"broadcast": (num, (size - 1) * total if rank == 0 else 0)}
        if sync == "server-gradient":
            assert phases["backward 2"] == gradients
        else:
            outputs = {
                "gather": (2, 0 if rank == 0 else phases["hidden"] + phases["labels"]),
                "scatter": (1, (size - 1) * phases["hidden"] if rank == 0 else 0),
            }
            assert phases["backward 2"] == outputs | gradients
            assert phases["backward 0"] == phases["backward 1"] == outputs
        # the norm is the server's alone: one number for all ranks
        assert set(phases["step"]) == {"all_reduce"}


def test_zero1(size: int) -> None:
    for phases in phases_of("zero1", size):
        buckets = phases["buckets"]
        part = (size - 1) * sum(buckets) // size
        assert phases["backward 2"] == {"reduce_scatter": (len(buckets), part)}
        assert phases["publish"] == {"all_gather": (len(buckets), part)}
        assert phases["step"] == {"all_reduce": (1, 2 * (size - 1) * 8 // size)}  # the norm, a float64


@pytest.mark.parametrize("sync", [sync for sync in SYNCS if sync != "server-loss"])
def test_only_the_final_microbatch_sends(sync: str, size: int) -> None:
    for phases in phases_of(sync, size):
        assert phases["backward 0"] == phases["backward 1"] == {}
        assert phases["backward 2"] != {}


@pytest.mark.parametrize(
    "layout, bucket, expected",
    [
        ({"data": {"size": 8}}, "auto", 16),
        ({"data": {"size": 64}}, "auto", 64),
        ({"data": {"size": 16, "sync": "zero1"}, "context": {"size": 2}}, "auto", 32),
        ({"data": {"size": 16}, "tensor": {"kind": "megatron", "size": 4}}, "auto", 16),
        ({"data": {"size": 64}}, "4M", 4),
    ],
)
def test_a_bucket_grows_with_the_ranks_that_sum_it(layout: dict[str, Any], bucket: str, expected: int) -> None:
    """Each rank sends at least 1 MiB."""
    data = layout["data"] | {"bucket": bucket}
    config = parse_config({"layout": layout | {"data": data}, "batch": {"global": 128}})
    assert bucket_bytes(config) == expected * 2**20
