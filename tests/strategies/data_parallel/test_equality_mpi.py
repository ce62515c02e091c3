"""Every sync that supports MPI computes over MPI as one device does; test_equality has the same over gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.mpi_cases import ODD, SIZES, SYNCS
from tests.mpi_workers import Answer, flat, unflat
from tests.oracle.data_parallel import config_for
from tests.oracle.run import assembled, train
from tests.workers import run_ranks

STEPS = 8
"""gloo has 20: four ranks on two cores are slow under MPI."""


def train_for_files(mesh: Mesh, sync: str, size: int) -> tuple[list[float], dict[str, Tensor]]:
    losses, gradients = train(mesh, config_for(sync, size, steps=STEPS))
    return losses, flat(gradients)


@pytest.fixture(scope="module")
def serial() -> tuple[list[float], dict[str, dict[tuple[int, ...], Tensor]]]:
    return run_ranks(train, Grid((("data", 1),)), config_for("allreduce", 1, steps=STEPS))[0]


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.long if n == ODD else ()) for n in SIZES])
@pytest.mark.parametrize("sync", SYNCS)
def test_equals_serial_over_mpi(
    sync: str, size: int, serial: tuple, mpi: Callable[[int], dict[str, list[Answer]]]
) -> None:
    serial_losses, serial_gradients = serial
    answers = mpi(size)[sync]
    for losses, _ in answers:
        torch.testing.assert_close(losses, serial_losses, rtol=1e-10, atol=0)
    assert {"tokens.weight", "positions.weight", "norm.bias"} <= serial_gradients.keys()
    for name, held in serial_gradients.items():
        (expected,) = held.values()
        parts = [unflat(gradients).get(name, {}) for _, gradients in answers]
        actual = assembled(parts, expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{name}: {error}"
