"""The best validation of a run: its checkpoint stays, and a run whose validations get no better may end early.

The best so far is part of a run's progress, which every checkpoint holds: a run that was killed and resumed keeps the
same checkpoint and ends at the same step. All ranks judge rank 0's number, so that none ends a step before another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from meshwright.checkpoint.manifest import Best
from meshwright.config import Config
from meshwright.ranks.mesh import Mesh

PREFIX = "validation_"
"""The key of a metric in metrics.jsonl: `validation_loss`."""


class BestWatch:
    """A judge of validations, told each as it is made. `best`: what a checkpoint keeps of them."""

    def __init__(self, config: Config, mesh: Mesh, before: Best | None) -> None:
        """`before`: the best that the run had found when the checkpoint was written that it goes on from. It counts
        where it was found by the same metric."""
        self._metric, self._patience, self._keeps = (
            config.validation.metric, config.validation.patience, config.checkpoint.best,
        )  # fmt: skip
        self._mesh = mesh
        self.best = before if before is not None and before.metric == self._metric else None

    @property
    def over(self) -> bool:
        """Whether the run's patience is at its end."""
        return bool(self._patience) and self.best is not None and self.best.worse >= self._patience

    def judge(self, step: int, line: Mapping[str, object]) -> bool:
        """Take in a step's metrics; whether its checkpoint is to be kept. Called by all ranks together.

        A step that was skipped is never the best: a checkpoint of it would have the weights of one before.
        """
        if not (self._keeps or self._patience) or PREFIX + self._metric not in line or not line["applied"]:
            return False
        told = torch.tensor([line[PREFIX + self._metric]], dtype=torch.float64)
        self._mesh.world.broadcast(told, 0)
        found = best_after(self.best, step, self._metric, float(told))
        better = found is not self.best and found is not None and found.step == step
        self.best = found
        return better and self._keeps

    def __str__(self) -> str:
        """`best: step-30, validation loss 2.3100`; empty where there is none yet."""
        if self.best is None:
            return ""
        return f"best: step-{self.best.step}, validation {self.best.metric} {self.best.value:.4f}"


def best_after(best: Best | None, step: int, metric: str, value: float) -> Best | None:
    """The best after a validation: this one where it is strictly better than all before; else the one before, with one
    more that was no better. What is not a number is no better."""
    better = best is None or (value < best.value if metric == "loss" else value > best.value)
    if better and math.isfinite(value):
        return Best(step, metric, value)
    return None if best is None else Best(best.step, best.metric, best.value, best.worse + 1)
