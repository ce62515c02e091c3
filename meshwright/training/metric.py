"""A metric: a number that every rank tells all others of in each step, and what metrics.jsonl has of them. No torch.

| reduce | metrics.jsonl has of the ranks' numbers |
|--------|-----------------------------------------|
| each   | a list of them, in rank order           |
| sum    | their sum, added up in rank order       |
| any    | whether one of them is true             |
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
"""measure(step): a number, a row of numbers, a tensor on the step's device, or a function that is asked for the number
when the device has done the step. Called when the step's last sums have begun, before its weights change."""


@dataclass(frozen=True)
class Metric:
    """A number, or a row of numbers as long on all ranks, that each rank tells of a step.

    `measure`: a Measure, or as text the `module:attribute` of one; None: the loop says it (Trainer.turn). `shown`:
    metrics.jsonl has it under its name, reduced; else others are computed of it.
    """

    reduce: Literal["each", "sum", "any", "max"]
    measure: str | Measure | None = None
    dtype: Literal["float64", "int64", "bool"] = "float64"
    shown: bool = True

    def reduced(self, values: Sequence[Any]) -> Any:
        """Make one value of all ranks', as metrics.jsonl has it."""
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
    "validation_loss", "validation_accuracy", "root",
})  # fmt: skip
"""The keys of metrics.jsonl that are ours; docs/metrics.md says what each of them means."""
