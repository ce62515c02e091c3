"""One optimizer step over this rank's slots, all or nothing.

The norm is computed before the first write. A norm that is not finite (an fp16 overflow, on whichever rank) is the same
number everywhere, so all ranks skip together and nothing is half-applied. Half-precision slots have float32 masters,
which are what is stepped and what a checkpoint holds.

A GPU clips and skips by numbers that lie on it: `begin` gives it the step without waiting for any, and `conclude` is
told the norm when it is known, which may be in the step after. On a CPU the host knows it at once.

One exception: states that stream (an offloaded optimizer) step each slot while the next is still being summed, where
nothing needs to be known before the first write: no clipping, no loss scaling. A norm that is not finite then still
ends the run, and the newest checkpoint is the older one.

The learning rate as a pure function of the step, so that a resumed run needs no scheduler state.

Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740): fp16 gradients are kept out of the underflow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.bits.fixed import FixedPoint
from meshwright.config.schema import ScheduleSection
from meshwright.errors import DivergedError
from meshwright.optim.norm import norm_of_squares, squares_of
from meshwright.optim.states import InPlace, StatesFactory
from meshwright.parameters.bucket import Slot, StepWeights
from meshwright.ranks.agreement import make_equal
from meshwright.ranks.mesh import Mesh
from meshwright.registry import load_entry

if TYPE_CHECKING:
    from meshwright.config import Config

CLIP_EPSILON = 1e-6
"""Added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does."""


def learning_rate(peak: float, schedule: ScheduleSection, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up to the peak, some steps at it, decay to the floor.

    A pure function, not one of torch's schedulers: a resumed run has no state that could disagree with its step.
    """
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    rest = max(1, steps - schedule.warmup)
    stable = int(schedule.stable * rest)
    progress = min(1.0, max(0, step - schedule.warmup - stable) / (rest - stable))
    match schedule.decay:
        case "constant":
            return peak
        case "linear":
            left = 1 - progress
        case "cosine":
            left = (1 + math.cos(math.pi * progress)) / 2
        case "sqrt":
            left = 1 - math.sqrt(progress)
        case "inverse-sqrt":
            return peak * max(schedule.floor, math.sqrt(max(1, schedule.warmup) / (step + 1)))
    return peak * (schedule.floor + (1 - schedule.floor) * left)


SMALLEST = 2.0**-24
"""fp16's own smallest step: at this scale nothing overflows that is a number."""


@dataclass
class LossScaler:
    """`scale` multiplies the loss. It is halved on an overflow and doubled after `interval` good steps in a row.

    `max_skips`: so many overflows in a row are no matter of scale any more, and end the run.

    Pure bookkeeping on numbers that every rank knows, so that all ranks stay agreed without a message.
    """

    scale: float
    interval: int
    dynamic: bool
    max_skips: int = 1
    good_steps: int = 0
    skips: int = 0
    """Overflows in a row, up to now."""

    @property
    def may_skip(self) -> bool:
        """Whether another overflow may still be a matter of scale."""
        return self.dynamic and self.scale > SMALLEST and self.skips + 1 < self.max_skips

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale /= 2
            self.good_steps = 0
            self.skips += 1
            return
        self.skips = 0
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= 2
            self.good_steps = 0


@dataclass(frozen=True)
class StepResult:
    """`gradient_norm` before clipping, of the unscaled gradient; `applied` is False where the step was skipped."""

    gradient_norm: float
    learning_rate: float
    applied: bool


@dataclass(frozen=True)
class PendingStep:
    """A step that the device was given. `norm`: its gradient's, a float64 scalar on the device."""

    step: int
    learning_rate: float
    norm: Tensor


class Optimizer:
    """torch's AdamW or SGD over slots, with clipping, a schedule and loss scaling around it."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        mesh: Mesh,
        make_states: StatesFactory = InPlace,
        fixed: FixedPoint | None = None,
    ) -> None:
        """`fixed`: how gradients were added as integers, where they were."""
        self.fixed = fixed
        self.config = config
        self.slots = list(slots)
        self.mesh = mesh
        self.held = make_states(config, self.slots)
        self.steps_taken = 0
        """Steps that were applied: the count of Adam's bias correction. A pending step counts as applied."""
        scale, fp16 = config.precision.loss_scale, config.precision.dtype == "fp16"
        self.scaler = LossScaler(scale.initial if fp16 else 1.0, scale.interval, fp16, scale.max_skips)

    @property
    def streams(self) -> bool:
        """Whether slots are stepped one by one as their gradients arrive, before the norm is known."""
        # Clipping and loss scaling need the norm, hence the last gradient, before the first write.
        return self.held.streams and self.config.optimizer.clip is None and not self.scaler.dynamic

    def step(self, step: int, arrivals: Iterable[int] | None = None) -> StepResult:
        """Apply the gradients that the slots hold: sums of the loss times the scaler's scale.

        `arrivals`: every slot's index, each when its gradient is there; by default they all are.
        Raises DivergedError where the gradient is not finite and no smaller scale can help.
        """
        pending = self.begin(step, arrivals)
        return self.conclude(pending, float(pending.norm))

    def begin(self, step: int, arrivals: Iterable[int] | None = None, *, late: bool = False) -> PendingStep:
        """Give the device the step. `late`: the host does not wait for the norm, and the device skips by itself."""
        rate = learning_rate(self.config.optimizer.lr, self.config.optimizer.schedule, step, self.config.steps)
        squares: dict[int, Tensor] = {}
        arriving = range(len(self.slots)) if arrivals is None else arrivals
        if self.streams:
            self.held.step(self._measured(arriving, squares), self._update(rate))
            self._nudge(None)
        elif self.mesh.device.type == "cuda":
            # A GPU's sums are behind each other on its stream anyway, so one launch of all norms is the cheaper form.
            squares = dict(zip(sorted(arriving), squares_of(self.slots, self.fixed), strict=True))
        else:
            deque(self._measured(arriving, squares), maxlen=0)  # each while the next is under way
        # Squares are of gradients times the loss scale: the norm is told, and clipped by, without it.
        norm = norm_of_squares(self.slots, squares, self.mesh, self.fixed) / self.scaler.scale
        finite = torch.isfinite(norm)
        skips = late and self.config.optimizer.update.skips
        if not self.streams and (skips or bool(finite)):
            clip, divisor = self.config.optimizer.clip, None
            if self.scaler.dynamic or clip:
                excess = (norm + CLIP_EPSILON) / clip if clip else torch.ones_like(norm)
                divisor = self.scaler.scale * excess.clamp(min=1.0)  # one pass takes out the loss scale and clips
            if skips and divisor is not None:
                divisor = divisor.where(finite, 1.0)  # a step that is skipped leaves its gradients to be looked at
            skip = (~finite).float() if skips else None
            self.held.step(range(len(self.slots)), self._update(rate, divisor, skip))
            self._nudge(skip)
        self.steps_taken += 1
        return PendingStep(step, rate, norm)

    def conclude(self, pending: PendingStep, norm: float) -> StepResult:
        """The result of a step that was begun, of the number `norm`. Raises DivergedError as `step` does."""
        applied = math.isfinite(norm)
        # `begin` had counted it; Adam's bias correction goes by steps that were applied.
        self.steps_taken -= not applied
        if not applied and not self.scaler.may_skip:
            end = "the run has diverged"
            if (scaler := self.scaler).dynamic:
                skipped = f"{scaler.skips + 1} steps in a row were skipped, down to a loss scale of {scaler.scale:g}"
                end = f"{skipped} (precision.loss_scale.max_skips={scaler.max_skips})"
            raise DivergedError(f"step {pending.step + 1}: the gradient norm is {norm}: {end}")
        # The norm is one number on all ranks, so every rank's scale moves alike without a message.
        self.scaler.update(overflow=not applied)
        return StepResult(norm, pending.learning_rate, applied)

    def _update(self, rate: float, divisor: Tensor | None = None, skip: Tensor | None = None) -> StepWeights:
        """The step that states take, of gradients that it divides. `skip`: 1 where it writes nothing; None: it does."""
        settings, steps_taken = self.config.optimizer, self.steps_taken
        step = load_entry(settings.update.step)
        # On a CPU the number is known, and a pass is saved where it is 1.
        divides = divisor is not None and (divisor.device.type != "cpu" or bool(divisor != 1))
        skips = () if skip is None else (skip,)

        def update(weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], matrices: bool) -> None:
            if divisor is not None and divides:
                torch._foreach_div_(gradients, divisor.to(gradients[0].dtype))
            decay = settings.weight_decay if matrices else 0.0
            step(settings, weights, gradients, states, rate, decay, steps_taken, *skips)

        return update

    @torch.no_grad()
    def _nudge(self, skip: Tensor | None) -> None:
        """Move what is nudged by the signs of its gradients. `skip`: as for `_update`."""
        for slot in self.slots if self.config.model.routing.bias_rate else ():
            if slot.nudged:
                # The sign alone counts, so neither the loss scale nor clipping matters.
                assert slot.parameter.grad is not None, "a slot without a gradient"
                signs = slot.parameter.grad.sign()
                signs = signs if skip is None else signs * (1 - skip)
                slot.parameter.sub_(signs.to(slot.parameter.dtype), alpha=self.config.model.routing.bias_rate)

    def _measured(self, arrivals: Iterable[int], squares: dict[int, Tensor]) -> Iterator[int]:
        """Pass the arrivals on, and leave each slot's part of the norm in `squares`."""
        for index in arrivals:
            (squares[index],) = squares_of([self.slots[index]], self.fixed)
            yield index

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights."""
        self.held.refresh()

    def states(self, index: int) -> dict[str, Tensor]:
        """The weights and the state tensors of slot `index`, each [n] like the slot, by name. Views, not copies."""
        return self.held.tensors(index)

    def make_replicas_equal(self) -> list[str]:
        """Compare, by hash, the states that replicas hold alike; broadcast the first's where they differ: which."""
        # A weight that was made equal before has masters that still differ: they follow first.
        self.held.update_masters()
        differing = []
        for index, slot in enumerate(self.slots):
            comm = self.mesh.comm(*slot.copy_axes(self.mesh.grid))
            for kind, tensor in self.states(index).items():
                here = tensor.to(self.mesh.device)  # the tensor itself, unless it is kept elsewhere
                if make_equal(here, comm):
                    # A hash tells that a slot differs, not where in it: all parameters of the slot are named.
                    differing += [f"{kind} of {place.name}" for place in slot.places]
                    tensor.copy_(here)
        self.refresh()
        return differing

    def prepare_states(self, steps_taken: int) -> None:
        """Make zero states as torch would at its first step, so that a checkpoint's can be copied in."""
        self.steps_taken = steps_taken
        self.held.prepare()
