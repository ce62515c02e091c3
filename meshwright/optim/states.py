"""States: where the masters and moments of the slots live, and how they are stepped.

The optimizer decides (rate, divisor, whether a step is applied at all); states do it. `in_place.py` keeps them on the
device beside the slots; meshwright/memory/offload.py elsewhere. Both do torch's own steps, and leave the same bits.

States on the device, beside the slots: torch's fused step over the masters, all slots in one call.

The step is torch's own function and not its `Optimizer` class, whose constructor imports torch's compiler: two seconds
of a core in every rank, for nothing that a step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from meshwright.config import Config
from meshwright.parameters.bucket import Slot


class States(Protocol):
    """The masters and moments of some slots. Half-precision slots have float32 masters; others are their own."""

    streams: bool
    """Whether a slot is best stepped as soon as its gradient is there, while others' are still under way."""

    @property
    def coming_bytes(self) -> int:
        """Device memory that the first step will take for good."""

    def step(self, indices: Iterable[int], rate: float, divisor: float, steps_taken: int) -> None:
        """Step each slot once, in the order of `indices`, with its gradient divided; then the weights are new.

        `steps_taken`: how many steps were applied before this one.
        """

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The weights and the state tensors of slot `index`, each [n] like the slot, by name. Views, not copies."""

    def prepare(self, steps_taken: int) -> None:
        """Make zero states as torch would at its first step, so that a checkpoint's can be copied in."""

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights."""

    def adopt(self) -> None:
        """A master whose rounding is no longer the weight was left behind when the weight was mended: it takes it."""


StatesFactory = Callable[[Config, Sequence[Slot]], States]


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",), "sgd": ()}


class InPlace:
    """Every slot's master and moments, whole. A step is taken when all gradients are there."""

    streams = False

    def __init__(self, config: Config, slots: Sequence[Slot]) -> None:
        self.settings = config.optimizer
        self.slots = slots
        self.masters = [_master(slot.parameter) for slot in slots]
        self._moments: list[dict[str, Tensor]] = [{} for _ in slots]
        """By kind, each like its master. The first step makes them, or the checkpoint that is taken up."""
        self._has_moments = False

    @property
    def coming_bytes(self) -> int:
        if self._has_moments:
            return 0
        kinds = len(MOMENTS[self.settings.name])
        return sum(master.numel() * master.element_size() for master in self.masters) * kinds

    @torch.no_grad()
    def step(self, indices: Iterable[int], rate: float, divisor: float, steps_taken: int) -> None:
        for index in indices:
            parameter, master = self.slots[index].parameter, self.masters[index]
            assert parameter.grad is not None, "a slot without a gradient"
            if master is not parameter:
                master.grad = parameter.grad.to(master.dtype)
            if divisor != 1.0:
                assert master.grad is not None
                master.grad.div_(divisor)
        if not self._has_moments:
            self.prepare(steps_taken)
        for matrix in (True, False):
            members = [index for index, slot in enumerate(self.slots) if slot.matrix == matrix]
            if members:
                self._step_together(members, self.settings.weight_decay if matrix else 0.0, rate, steps_taken)
        self.refresh()

    def _step_together(self, members: list[int], weight_decay: float, rate: float, steps_taken: int) -> None:
        """Step slots that have the same weight decay, in one call of torch's fused kernel."""
        settings = self.settings
        masters = [self.masters[index] for index in members]
        weights = [master.detach() for master in masters]
        gradients = [master.grad for master in masters if master.grad is not None]
        assert len(gradients) == len(members), "a slot without a gradient"
        kinds = MOMENTS[settings.name]
        moments = [[self._moments[index][kind] for index in members] for kind in kinds]
        if settings.name == "adamw":
            first, second = moments
            beta1, beta2 = settings.betas
            # One a slot: torch adds this step to each.
            counts = [torch.tensor(float(steps_taken), device=weight.device) for weight in weights]
            adamw(
                weights, gradients, first, second, [], counts, fused=True, amsgrad=False, maximize=False,
                beta1=beta1, beta2=beta2, lr=rate, weight_decay=weight_decay, eps=settings.epsilon,
            )  # fmt: skip
        else:
            sgd(
                weights, gradients, list(moments[0]) if moments else [None] * len(members), fused=True, nesterov=False,
                maximize=False, dampening=0.0, momentum=settings.momentum if moments else 0.0, lr=rate,
                weight_decay=weight_decay,
            )  # fmt: skip

    def tensors(self, index: int) -> dict[str, Tensor]:
        return {"weight": self.masters[index].detach(), **self._moments[index]}

    def prepare(self, steps_taken: int) -> None:
        kinds = MOMENTS[self.settings.name]
        self._moments = [{kind: torch.zeros_like(master.detach()) for kind in kinds} for master in self.masters]
        self._has_moments = True

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights, and drop the masters' gradients."""
        for slot, master in zip(self.slots, self.masters, strict=True):
            if master is not slot.parameter:
                master.grad = None
                slot.parameter.data.copy_(master.data)

    @torch.no_grad()
    def adopt(self) -> None:
        for slot, master in zip(self.slots, self.masters, strict=True):
            if not torch.equal(master.to(slot.parameter.dtype), slot.parameter):
                master.copy_(slot.parameter)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy of a half-precision one."""
    return nn.Parameter(parameter.detach().float()) if parameter.element_size() < 4 else parameter
