"""Numbers that go bad: which parameter is the first, on which rank, and whether its weights or its gradients are.

Nothing is looked through while all is well: a step knows by the norm and the loss, a checkpoint looks before it is
written. What is found is told by every rank in the same words, since all ranks tell each other what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import DivergedError
from meshwright.parameters.bucket import FlatWeights, Place
from meshwright.parts import Parts
from meshwright.ranks.agreement import all_rows
from meshwright.training.step_report import StepReport

REMEDY = "lower optimizer.lr, raise optimizer.schedule.warmup, or look at the data"


@dataclass(frozen=True)
class Bad:
    """Parameters in which some rank found a bad number: the first in the model's order, that rank, and how many."""

    parameter: str
    rank: int
    count: int

    @property
    def text(self) -> str:
        more = f" (the first of {self.count} parameters)" if self.count > 1 else ""
        return f"{self.parameter} on rank {self.rank}{more}"


def require_finite_weights(parts: Parts, step: int) -> None:
    """Raise DivergedError where a weight or a state of the optimizer is not finite, or too large to be squared."""
    slots, optimizer = parts.strategy.slots, parts.optimizer
    states = (
        FlatWeights(tensor, slot.places, ())
        for index, slot in enumerate(slots)
        for tensor in optimizer.states(index).values()
    )
    bad = _first_bad(parts, [*parts.strategy.weights, *states], _sound)
    if bad is not None:
        raise DivergedError(
            f"step {step}: the weights of {bad.text} are not finite, or beyond 1e19: nothing is saved; {REMEDY}"
        )


def require_finite_loss(step: int, reports: Sequence[StepReport]) -> None:
    """Raise DivergedError where the loss is not a number although the gradient's norm is one."""
    if ranks := _bad_losses(reports):
        raise DivergedError(f"step {step}: {_losses(ranks)}, although the gradient is finite; {REMEDY}")


def diagnosed(parts: Parts, reports: Sequence[StepReport], error: DivergedError) -> DivergedError:
    """The error of a step whose gradient is not finite, with what is known of it. Called by all ranks."""
    gradients = _bad_gradients(parts)
    found = [str(error)]
    if gradients is not None:
        found.append(f"the gradient of {gradients.text} is not finite")
    if parts.optimizer.streams:
        found.append("the weights have taken the step already, and are not saved")
    else:
        weights = _bad_weights(parts)
        found.append("all weights are finite" if weights is None else f"the weights of {weights.text} are not finite")
    if ranks := _bad_losses(reports):
        found.append(_losses(ranks))
    return DivergedError("; ".join([*found, REMEDY]))


def require_curable(parts: Parts, step: int) -> None:
    """After a skipped step: raise DivergedError where weights are bad, which no smaller loss scale can mend."""
    bad = _bad_weights(parts)
    if bad is not None:
        raise DivergedError(f"step {step}: the step overflowed: the weights of {bad.text} are not finite; {REMEDY}")


def _bad_weights(parts: Parts) -> Bad | None:
    return _first_bad(parts, parts.strategy.weights, _finite)


def _bad_gradients(parts: Parts) -> Bad | None:
    gradients = (
        FlatWeights(slot.parameter.grad, slot.places, ())
        for slot in parts.strategy.slots
        if slot.parameter.grad is not None
    )
    return _first_bad(parts, gradients, _finite)


def _first_bad(parts: Parts, held: Iterable[FlatWeights], good: Callable[[Tensor], bool]) -> Bad | None:
    """The model's first parameter that is not `good` on some rank, and how many are not. Sends 16 bytes."""
    names = list(parts.specs)
    order = {name: index for index, name in enumerate(names)}
    mine = {order[place.name] for flat in held if not good(flat.values) for place in _bad_places(flat, good)}
    told = torch.tensor([min(mine, default=len(names)), len(mine)], device=parts.mesh.device)
    everyone = all_rows(told, parts.mesh.world)
    rows = everyone.tolist()
    first, rank = min((first, rank) for rank, (first, _) in enumerate(rows))
    return None if first == len(names) else Bad(names[first], rank, max(count for _, count in rows))


def _bad_places(flat: FlatWeights, good: Callable[[Tensor], bool]) -> Iterable[Place]:
    return (place for place in flat.places if not good(flat.values[place.start : place.stop]))


def _finite(x: Tensor) -> bool:
    return _largest(x) < math.inf


def _sound(x: Tensor) -> bool:
    """Finite, and a square away from the end of float32: what diverges passes through that before it is infinite."""
    return _largest(x) < math.sqrt(torch.finfo(torch.float32).max)


def _largest(x: Tensor) -> float:
    """The largest magnitude; not a number where one is not."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.detach())
    return float(torch.maximum(-low, high))


def _bad_losses(reports: Sequence[StepReport]) -> list[int]:
    return [rank for rank, report in enumerate(reports) if not math.isfinite(report.loss)]


def _losses(ranks: Sequence[int]) -> str:
    return f"the loss is not finite on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
