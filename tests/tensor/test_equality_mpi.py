"""The tensor kits over MPI compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.ranks.mesh import Mesh
from tests.data_parallel.test_equality import train
from tests.mpi_cases import TENSOR
from tests.mpi_workers import Answer
from tests.tensor.test_equality import config_for, serial


def train_for_files(mesh: Mesh, tensor: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """`train`, its gradients flat: `name@offset,offset`."""
    losses, gradients = train(mesh, config_for("gpt2", tensor, steps=3))
    return losses, {
        f"{name}@{','.join(map(str, offsets))}": part
        for name, held in gradients.items()
        for offsets, part in held.items()
    }


@pytest.mark.parametrize("size, name", [(size, name) for size, layouts in TENSOR.items() for name in layouts])
def test_equals_serial_over_mpi(size: int, name: str, mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    serial_losses, serial_gradients = serial("gpt2")
    answers = mpi(size)[name]
    for losses, _ in answers:
        torch.testing.assert_close(losses, serial_losses[:3], rtol=1e-10, atol=0)
    for parameter, held in serial_gradients.items():
        (expected,) = held.values()
        actual = torch.full_like(expected, torch.nan)
        for _, flat in answers:
            for label, part in flat.items():
                owner, _, offsets = label.partition("@")
                if owner == parameter:
                    starts = map(int, offsets.split(","))
                    actual[tuple(slice(o, o + n) for o, n in zip(starts, part.shape, strict=True))] = part
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{parameter}: {error}"
