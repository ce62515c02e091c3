"""Helpers of the models' tests: a model with random weights, and steps next to another program's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from meshwright.compute.tensor.serial import SerialKit
from meshwright.config import Config
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_model

Family = TypeVar("Family", bound=nn.Module)


def random_model(family: type[Family], mesh: Mesh, config: Config) -> Family:
    """Return a model with every parameter moved from the initial value, biases and norms included."""
    model = build_model(config, SerialKit(mesh), mesh)
    assert isinstance(model, family)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model


def train_both(
    optimizers: Sequence[torch.optim.Optimizer], steps: int, losses_at: Callable[[int], tuple[Tensor, Tensor]]
) -> tuple[list[float], list[float]]:
    """Return both models' losses. `losses_at` returns both models' loss of a step's batch."""
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        for index, loss in enumerate(losses_at(step)):
            loss.backward()
            losses[index].append(float(loss.detach()))
            optimizers[index].step()
            optimizers[index].zero_grad()
    return losses
