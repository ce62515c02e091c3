"""A rank that starts with a wrong weight is named and mended; the float32 masters are mended as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.compute.tensor.serial import SerialKit
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.training.rank_model import build_model
from tests.harness import build
from tests.oracle.data_parallel import config_for
from tests.workers import run_ranks

WRONG = "blocks.1.feed_forward.expand.weight"
HALF = {"precision": {"level": "O2", "dtype": "bf16"}}


def plant_in_bucket(
    mesh: Mesh, sync: str, changes: dict
) -> tuple[list[str], list[str], dict[str, Tensor], list[Tensor]]:
    """Begin with a wrong element on rank 1. Return the results of two searches in a row, the weights, and the masters'
    weights."""
    parts = build(config_for(sync, mesh.size("data"), **changes), mesh)
    if mesh.rank == 1:
        parts.model.get_parameter(WRONG).data[-1, -1] += 1
    optimizer = Optimizer(parts.config, parts.strategy.slots, mesh)  # the masters are copies of the wrong weights
    found = parts.strategy.make_replicas_equal()
    optimizer.make_replicas_equal()
    again = [*parts.strategy.make_replicas_equal(), *optimizer.make_replicas_equal()]
    weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    masters = [optimizer.held.tensors(index)["weight"].clone() for index in range(len(optimizer.slots))]
    return found, again, weights, masters


def clean(mesh: Mesh, changes: dict) -> Tensor:
    return build_model(config_for("allreduce", 1, **changes), SerialKit(mesh), mesh).get_parameter(WRONG).detach()


@pytest.mark.parametrize("changes", [{}, HALF], ids=["float64", "bf16 with masters"])
@pytest.mark.parametrize("sync", ["allreduce", "zero1", "server-gradient"])
def test_buckets(sync: str, changes: dict) -> None:
    (wanted,) = run_ranks(clean, Grid((("data", 1),)), changes)
    results = run_ranks(plant_in_bucket, Grid((("data", 2),)), sync, changes, transport="torch")
    for found, again, weights, masters in results:
        assert found == [WRONG]
        assert again == []
        assert torch.equal(weights[WRONG], wanted)
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][2][name])
        if sync == "allreduce":
            assert all(torch.equal(a, b) for a, b in zip(masters, results[0][3], strict=True))
