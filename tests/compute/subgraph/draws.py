"""Records the random numbers that dropout draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compute.model import Batch, rows_of
from meshwright.compute.models.attention import AttentionCore
from meshwright.config import Config
from meshwright.ranks.mesh import Mesh
from meshwright.training.loop import Trainer
from tests.harness import build
from tests.oracle.batches import global_batch


class Same:
    """The same samples again and again."""

    def __init__(self, config: Config) -> None:
        self.batch = global_batch(config, 0)

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    def samples(self, first: int, count: int) -> Batch:
        start = first % len(self)
        return rows_of(self.batch, slice(start, start + count))

    def held_out(self, first: int, count: int) -> Batch:
        return self.samples(first, count)


Draws = dict[str, list[bytes]]
"""In order: the zeros of each dropout outside of branches; the state of the random stream at each attention core."""


def draws(mesh: Mesh, config: Config) -> tuple[Draws, list[float]]:
    """Return the draws of two steps on the same samples, and the losses."""
    parts = build(config, mesh)
    drawn: Draws = {"outside": [], "inside": []}

    def saw(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.numel():  # without common layers there is nothing to drop
            drawn["outside"].append((output == 0).cpu().numpy().tobytes())

    def run(function: Any, *arguments: Any) -> Any:
        drawn["inside"].append(torch.get_rng_state().numpy().tobytes())
        return function(*arguments)

    for module in parts.model.modules():
        if isinstance(module, AttentionCore):
            module.run = run
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(saw)
    trainer = Trainer(parts, Same(config))
    losses = [float(str(trainer.turn(None)[0][0]["loss"])) for _ in range(2)]
    return drawn, losses
