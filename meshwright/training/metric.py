"""A metric: a number that all ranks exchange in each step, and its reduction in metrics.jsonl. Imports no torch.

| reduce | value in metrics.jsonl                  |
|--------|-----------------------------------------|
| each   | the ranks' numbers, in rank order       |
| sum    | the sum, added up in rank order         |
| any    | whether any rank's is true              |
| max    | the largest                             |

Ours are the table of step_report.py; another package brings one under its name (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from meshwright.training.record import StepRecord

Measure = Callable[["StepRecord"], Any]
"""measure(step): a number, a row of numbers, a tensor on the step's device, or a function that returns the number and
is called once the device has finished the step. Called after the last gradient sums start, before weights change."""


@dataclass(frozen=True)
class Metric:
    """A number per rank and step, or a row of numbers of the same length on all ranks.

    `measure`: a Measure or a `module:attribute`; None: Trainer.turn passes the number. `shown`: the reduced number is
    in metrics.jsonl under the metric's name; if False, the number only serves to compute other keys.
    """

    reduce: Literal["each", "sum", "any", "max"]
    measure: str | Measure | None = None
    dtype: Literal["float64", "int64", "bool"] = "float64"
    shown: bool = True

    def reduced(self, values: Sequence[Any]) -> Any:
        """Reduce the ranks' values, given in rank order; rows are reduced column by column unless `reduce` is each."""
        if self.reduce == "each":
            return list(values)
        if isinstance(values[0], list):
            return [self.reduced(column) for column in zip(*values, strict=True)]
        if self.reduce == "any":
            return any(values)
        return sum(values) if self.reduce == "sum" else max(values)


KEYS = frozenset({
    "step", "loss", "learning_rate", "grad_norm", "loss_scale", "applied", "phase_seconds", "tokens",
    "tokens_per_second", "step_seconds", "idle_shares", "days_for_300g_tokens", "peak_memory_bytes", "sent_bytes",
    "flops_per_second", "paper_flops_per_second", "mfu", "utilisation", "own_seconds", "dropped_share", "straggler",
    "validation_loss", "validation_accuracy", "root", "rewards_chosen", "rewards_rejected", "reward_margin",
    "reward_accuracy",
})  # fmt: skip
"""The built-in keys of metrics.jsonl, explained in docs/metrics.md."""
