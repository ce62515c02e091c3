"""Pipelines over MPI compute as one device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from meshwright.ranks.mesh import Mesh
from tests.mpi_cases import ODD, PIPELINES
from tests.mpi_workers import Answer, flat, unflat
from tests.oracle.pipeline import pipelined, serial
from tests.oracle.run import check, train


def train_for_files(
    mesh: Mesh, data: int, stages: int, schedule: str, tensor: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    losses, gradients = train(mesh, pipelined("gpt2", stages, schedule, tensor, data))
    return losses, flat(gradients)


@pytest.mark.parametrize(
    "size, name",
    [
        pytest.param(size, name, marks=pytest.mark.long if size == ODD else ())
        for size, layouts in PIPELINES.items()
        for name in layouts
    ],
)
def test_equals_serial_over_mpi(size: int, name: str, mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    check([(losses, unflat(parts)) for losses, parts in mpi(size)[name]], serial("gpt2"))
