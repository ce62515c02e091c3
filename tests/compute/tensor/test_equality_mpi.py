"""The tensor kits over MPI compute one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from meshwright.ranks.mesh import Mesh
from tests.mpi_cases import ODD, TENSOR
from tests.mpi_workers import Answer, flat, unflat
from tests.oracle.run import check, train
from tests.oracle.tensor import config_for, serial


def train_for_files(mesh: Mesh, tensor: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    losses, gradients = train(mesh, config_for("gpt2", tensor, steps=3))
    return losses, flat(gradients)


@pytest.mark.parametrize(
    "size, name",
    [
        pytest.param(size, name, marks=pytest.mark.long if size == ODD else ())
        for size, layouts in TENSOR.items()
        for name in layouts
    ],
)
def test_equals_serial_over_mpi(size: int, name: str, mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    check([(losses, unflat(parts)) for losses, parts in mpi(size)[name]], serial("gpt2"))
