"""The best validation of a run: the best checkpoint is kept, and a run may end early if validations stop improving.

Every checkpoint holds the best validation so far, so a resumed run keeps the same checkpoint and ends at the same step.
All ranks judge rank 0's number, so that all end at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from meshwright.config import Config
from meshwright.ranks.mesh import Mesh
from meshwright.training.checkpoint.manifest import Best

PREFIX = "validation_"
"""The key of a metric in metrics.jsonl: `validation_loss`."""


class BestWatch:
    """A watch that compares each validation with the best so far (`best`, stored in checkpoints)."""

    def __init__(self, config: Config, mesh: Mesh, before: Best | None) -> None:
        """Start from `before`, the best validation in the checkpoint to resume from; ignored if the metric differs."""
        self._metric, self._patience, self._keeps = (
            config.validation.metric, config.validation.patience, config.checkpoint.best,
        )  # fmt: skip
        self._mesh = mesh
        self.best = before if before is not None and before.metric == self._metric else None

    @property
    def over(self) -> bool:
        """Return whether `validation.patience` validations in a row were no better than the best."""
        return bool(self._patience) and self.best is not None and self.best.worse >= self._patience

    def judge(self, step: int, line: Mapping[str, object]) -> bool:
        """Return whether the checkpoint of the step with these metrics must be kept as the best. A collective call."""
        # A skipped step is never the best: its checkpoint would hold the previous step's weights.
        if not (self._keeps or self._patience) or PREFIX + self._metric not in line or not line["applied"]:
            return False
        value = torch.tensor([line[PREFIX + self._metric]], dtype=torch.float64)
        self._mesh.world.broadcast(value, 0)
        self.best = best_after(self.best, step, self._metric, float(value))
        return self._keeps and self.best is not None and self.best.step == step


def best_after(best: Best | None, step: int, metric: str, value: float) -> Best | None:
    """Return the new best if `value` is finite and strictly better (lower loss, higher accuracy); else `best` with the
    count of worse validations raised by one."""
    better = best is None or (value < best.value if metric == "loss" else value > best.value)
    if better and math.isfinite(value):
        return Best(step, metric, value)
    return None if best is None else Best(best.step, best.metric, best.value, best.worse + 1)
