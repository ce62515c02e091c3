"""Trains on the ranks of a layout, and compares losses and gradients with one device's in float64."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.compute.model import Batch
from meshwright.config import Config
from meshwright.ranks.mesh import Mesh
from meshwright.training.parts import Parts
from meshwright.training.step import train_step as step_on
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.workers import run_ranks


def train_step(
    parts: Parts, step: int, batch: Batch | None = None
) -> tuple[float, dict[str, dict[tuple[int, ...], torch.Tensor]]]:
    """Train one step on a batch, by default the family's batch of the step. Return the loss, and the gradients of this
    rank's slots by name and offsets."""
    gradients: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}

    def keep() -> None:
        for slot in parts.strategy.slots:
            for place in slot.places:
                part = slot.parameter.grad[place.start : place.stop].view(place.box.lengths).clone()
                gradients.setdefault(place.name, {})[place.box.offsets] = part

    if batch is None:
        batch = BATCHES[parts.config.model.family](parts.config, step)
    return step_on(parts, batch, step, observe=keep).loss, gradients


def train(mesh: Mesh, config: Config) -> tuple[list[float], dict[str, dict[tuple[int, ...], torch.Tensor]]]:
    parts = build(config, mesh)
    assert parts.strategy.make_replicas_equal() == []
    first_gradients = None
    losses = []
    for step in range(config.steps):
        loss, gradients = train_step(parts, step)
        first_gradients = first_gradients or gradients
        losses.append(loss)
    assert first_gradients is not None
    return losses, first_gradients


def assembled(parts: list[dict[tuple[int, ...], torch.Tensor]], shape: torch.Size) -> torch.Tensor:
    whole = torch.full(shape, torch.nan, dtype=torch.float64)
    for held in parts:
        for offsets, part in held.items():
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return whole


def run(config: Config) -> list[Any]:
    return run_ranks(train, config.grid, config, token_axes=config.layout.token_axes, forked=config.compile == "blocks")


def check(results: list[Any], serial: Any) -> None:
    losses, expected_gradients = serial
    for mine, _ in results:
        torch.testing.assert_close(mine, losses[: len(mine)], rtol=1e-10, atol=0)
    for name, held in expected_gradients.items():
        (expected,) = held.values()
        actual = assembled([gradients[name] for _, gradients in results if name in gradients], expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{name}: {error}"
