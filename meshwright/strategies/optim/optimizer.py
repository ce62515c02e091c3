"""One optimizer step over this rank's slots, all or nothing.

The norm of all gradients is computed before the first write. The norm is equal on all ranks: if not finite (an fp16
overflow on any rank), all ranks skip the step. Half-precision slots have float32 masters, which the optimizer steps and
checkpoints hold; with bf16 masters the weights themselves are stepped (rounding.py).

On a GPU, clipping and skipping read device tensors: `begin` enqueues the step without a synchronisation, and `conclude`
gets the norm on the host, possibly a step later. On a CPU the host has the norm at once.

Exception: without clipping and loss scaling, an offloaded optimizer steps each slot while the next slot's gradient is
still being summed (`Optimizer.streams`). A norm that is not finite is then known too late to skip: the run ends, and
can continue from the previous checkpoint.

The learning rate is a function of the step alone: a resumed run needs no scheduler state.

Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740) keeps small fp16 gradients from rounding to zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Place, Slices, Slot, StepWeights
from meshwright.compute.parameters.fixed import GRADIENT_DIGITS, FixedPoint
from meshwright.compute.parameters.role import StepRule
from meshwright.compute.parameters.rounding import Draw
from meshwright.config.registry import load_entry
from meshwright.config.schema import ScheduleSection
from meshwright.ranks.agreement import make_equal
from meshwright.ranks.errors import DivergedError
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.norm import norm_of_squares, squares_of
from meshwright.strategies.optim.states import InPlace, StatesFactory

if TYPE_CHECKING:
    from meshwright.config import Config

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by the norm, as torch.nn.utils.clip_grad_norm_ does."""


def learning_rate(peak: float, schedule: ScheduleSection, step: int, steps: int) -> float:
    """Return the rate of step `step` (from 0) of `steps`: linear warm-up to the peak, a share `stable` of the rest,
    decay."""
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
"""The smallest positive fp16 number. A loss scaled by this number overflows only if not finite itself."""


@dataclass
class LossScaler:
    """The loss scale: `scale` is halved on an overflow, doubled after `interval` steps without an overflow.

    After `max_skips` overflows in a row the run ends: a smaller scale has not helped. All ranks know the norm, so
    scales stay equal without a message.
    """

    scale: float
    interval: int
    dynamic: bool
    max_skips: int = 1
    good_steps: int = 0
    skips: int = 0
    """Overflows in a row until now."""

    @property
    def may_skip(self) -> bool:
        """Whether an overflow in the next step is skipped instead of ending the run."""
        return self.dynamic and self.scale > SMALLEST and self.skips + 1 < self.max_skips

    def resume(self, scale: float, good_steps: int) -> None:
        """Continue after a checkpoint.

        Args:
            scale: the factor of the loss.
            good_steps: steps without an overflow since the factor was last changed.
        """
        self.scale, self.good_steps = scale, good_steps

    def update(self, *, overflow: bool) -> None:
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
    """The result of a step."""

    gradient_norm: float
    """The norm before clipping, without the loss scale."""
    learning_rate: float
    applied: bool
    """False for a skipped step."""


@dataclass(frozen=True)
class PendingStep:
    """A step enqueued on the device. `norm`: of its gradients, a float64 scalar on the device."""

    step: int
    learning_rate: float
    norm: Tensor


@dataclass(frozen=True)
class StoredState:
    """A slot's weights (`kind` weight) or one of its states: `values`, flat, with the places of its parameters.

    `slices`: describes the flat memory that contains the values as this rank's slice.
    """

    kind: str
    values: Tensor
    places: tuple[Place, ...]
    slices: Slices


class Optimizer:
    """torch's AdamW or SGD over slots, with clipping, a learning-rate schedule and loss scaling."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[Slot],
        mesh: Mesh,
        make_states: StatesFactory = InPlace,
        fixed: FixedPoint | None = None,
    ) -> None:
        """`fixed`: the fixed-point format in which gradients were summed (`bits: layout-free`), or None."""
        self.fixed = fixed
        self.config = config
        self.slots = list(slots)
        self.mesh = mesh
        self.held = make_states(config, self.slots)
        self.steps_taken = 0
        """Applied steps, the exponent of Adam's bias correction. A pending step counts as applied."""
        scale, fp16 = config.precision.loss_scale, config.precision.dtype == "fp16"
        self.scaler = LossScaler(scale.initial if fp16 else 1.0, scale.interval, fp16, scale.max_skips)
        # Clipping and loss scaling need the norm, hence the last gradient, before the first write.
        self.streams = self.held.streams and config.optimizer.clip is None and not fp16
        """Whether each slot is stepped when its gradient arrives, before the norm is known."""

    def step(self, step: int, arrivals: Iterable[int] | None = None) -> StepResult:
        """Apply the slots' gradients, which are gradients of the loss times `scaler.scale`.

        Args:
            step: the number of the step, from 0.
            arrivals: yields each slot's index when its gradient is summed; None: all are summed.

        Raises:
            DivergedError: the norm is not finite, and no smaller loss scale is left to try.
        """
        pending = self.begin(step, arrivals)
        return self.conclude(pending, float(pending.norm))

    def begin(self, step: int, arrivals: Iterable[int] | None = None, *, late: bool = False) -> PendingStep:
        """Enqueue the step. `late`: the host does not wait for the norm; the device skips a step that is not finite."""
        rate = learning_rate(self.config.optimizer.lr, self.config.optimizer.schedule, step, self.config.steps)
        squares: dict[int, Tensor] = {}
        arriving = range(len(self.slots)) if arrivals is None else arrivals
        draw = Draw(self.config.seed, self.steps_taken)
        if self.streams:
            self.held.step(self._measured(arriving, squares), self._update(rate), draw)
            self._nudge(None)
        elif self.mesh.device.type == "cuda":
            # All sums are on one stream and end in order: one launch for all norms instead of one for each slot.
            squares = dict(zip(sorted(arriving), squares_of(self.slots, self.mesh, self.fixed), strict=True))
        else:
            deque(self._measured(arriving, squares), maxlen=0)  # one slot's norm while the next slot is being summed
        # The loss scale is divided out of the norm, which is compared with `clip` and reported.
        norm = norm_of_squares(self.slots, squares, self.mesh, self.fixed) / self.scaler.scale
        finite = torch.isfinite(norm)
        skips = late and self.config.optimizer.update.skips
        if not self.streams and (skips or bool(finite)):
            clip, divisor = self.config.optimizer.clip, None
            if self.scaler.dynamic or clip:
                excess = (norm + CLIP_EPSILON) / clip if clip else torch.ones_like(norm)
                divisor = self.scaler.scale * excess.clamp(min=1.0)  # unscales and clips in one pass
            if skips and divisor is not None:
                divisor = divisor.where(finite, 1.0)  # a skipped step leaves its gradients unchanged, for diagnosis
            skip = (~finite).float() if skips else None
            self.held.step(range(len(self.slots)), self._update(rate, divisor, skip), draw)
            self._nudge(skip)
        self.steps_taken += 1
        return PendingStep(step, rate, norm)

    def conclude(self, pending: PendingStep, norm: float) -> StepResult:
        """Return the result of a step, given its norm on the host. Raises DivergedError as `step` does."""
        applied = math.isfinite(norm)
        # `begin` counted the step as applied.
        self.steps_taken -= not applied
        if not applied and not self.scaler.may_skip:
            end = "the run has diverged"
            if self.fixed is not None:
                largest = self.fixed.limit / 2.0**GRADIENT_DIGITS
                most = f"{largest:g}, the most that bits.kind=layout-free adds exactly"
                end += f", or a gradient has an addend above {most}"
            if (scaler := self.scaler).dynamic:
                skipped = f"{scaler.skips + 1} steps in a row were skipped, down to a loss scale of {scaler.scale:g}"
                end = f"{skipped} (precision.loss_scale.max_skips={scaler.max_skips})"
            raise DivergedError(f"step {pending.step + 1}: the gradient norm is {norm}: {end}")
        self.scaler.update(overflow=not applied)
        return StepResult(norm, pending.learning_rate, applied)

    def _update(self, rate: float, divisor: Tensor | None = None, skip: Tensor | None = None) -> StepWeights:
        """Return the function that `States.step` calls: divide the gradients by `divisor`, then update the weights.

        `skip`: a scalar tensor on the device, 1 to write nothing; None: never skip.
        """
        settings, steps_taken = self.config.optimizer, self.steps_taken
        entries = {"elements": settings.update.step, "matrices": settings.update.matrix_step}
        steps = {by: load_entry(entry) for by, entry in entries.items() if entry}
        # On a CPU the divisor's value is known; dividing by 1 would be a needless pass over all gradients.
        divides = divisor is not None and (divisor.device.type != "cpu" or bool(divisor != 1))
        skips = () if skip is None else (skip,)

        def update(weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], rule: StepRule) -> None:
            if divisor is not None and divides:
                torch._foreach_div_(gradients, divisor.to(gradients[0].dtype))
            decay = settings.weight_decay if rule.decays else 0.0
            steps[rule.by](settings, weights, gradients, states, rate, decay, steps_taken, *skips)

        return update

    @torch.no_grad()
    def _nudge(self, skip: Tensor | None) -> None:
        """Step the routers' biases by `bias_rate` times the sign of their gradients; `skip`: as in `_update`.

        DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
        """
        for slot in self.slots if self.config.model.routing.bias_rate else ():
            if slot.rule.by == "signs":
                # A sign needs neither unscaling nor clipping.
                assert slot.parameter.grad is not None, "a slot without a gradient"
                signs = slot.parameter.grad.sign()
                signs = signs if skip is None else signs * (1 - skip)
                slot.parameter.sub_(signs.to(slot.parameter.dtype), alpha=self.config.model.routing.bias_rate)

    def _measured(self, arrivals: Iterable[int], squares: dict[int, Tensor]) -> Iterator[int]:
        """Yield the arrivals, after writing each slot's sum of squares into `squares`."""
        for index in arrivals:
            (squares[index],) = squares_of([self.slots[index]], self.mesh, self.fixed)
            yield index

    def stored(self, index: int) -> Iterator[StoredState]:
        """Yield slot `index`'s weights and states."""
        slot = self.slots[index]
        shapes = {spec.name: spec.shape for spec in self.config.optimizer.update.states_of(slot.rule)}
        for state_name, values in self.held.tensors(index).items():
            shape_of = shapes.get(state_name)
            slices = slot.state_slices(shape_of)
            yield StoredState(state_name, values, slot.places if shape_of is None else slices.places, slices)

    def make_replicas_equal(self) -> list[str]:
        """Compare the replicas' states by hash; broadcast the first replica's if unequal.

        Returns a line for each state of each parameter that differed.
        """
        if self.mesh.grid.world_size == 1:
            return []  # offloaded states would be copied over the link four times
        # If a weight was just made equal, its master still differs.
        self.held.update_masters()
        differing = []
        for index, slot in enumerate(self.slots):
            comm = self.mesh.comm(*slot.copy_axes)
            for state_name, tensor in self.held.tensors(index).items() if comm.size > 1 else ():
                here = tensor.to(self.mesh.device)  # a copy only if states are offloaded
                if make_equal(here, comm):
                    # The hash is of the whole slot, so all of its parameters are named.
                    differing += [f"{state_name} of {region.name}" for region in slot.places]
                    tensor.copy_(here)
        self.held.refresh()
        return differing

    def prepare_states(self, steps_taken: int) -> None:
        """Allocate zero moments, as the first step would, to receive a checkpoint's."""
        self.steps_taken = steps_taken
        self.held.prepare()
