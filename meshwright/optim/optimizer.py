"""One optimizer step over this rank's slots, all or nothing.

The norm is known before the first write. A norm that is not finite (an fp16 overflow, on whichever rank) is the same
number everywhere, so all ranks skip together and nothing is half-applied. Half-precision slots have float32 masters,
which are what is stepped and what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.bucket import Slot
from meshwright.comm import same_everywhere
from meshwright.config import Config
from meshwright.errors import DivergedError
from meshwright.mesh import Mesh
from meshwright.optim.norm import gradient_norm
from meshwright.optim.scaler import LossScaler
from meshwright.optim.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """`gradient_norm` before clipping, of the unscaled gradient; `applied` is False where the step was skipped."""

    gradient_norm: float
    learning_rate: float
    applied: bool


class Optimizer:
    """torch's AdamW or SGD over slots, with clipping, a schedule, masters and loss scaling around it."""

    def __init__(self, config: Config, slots: Sequence[Slot], mesh: Mesh) -> None:
        self.config = config
        self.slots = list(slots)
        self.mesh = mesh
        self.masters = [_master(slot.parameter) for slot in slots]
        self.torch = _torch_optimizer(config, self.slots, self.masters)
        fp16 = config.precision.dtype == "fp16"
        self.scaler = LossScaler(
            config.precision.loss_scale.initial if fp16 else 1.0, config.precision.loss_scale.interval, dynamic=fp16
        )

    def step(self, step: int) -> StepResult:
        """Apply the gradients that the slots hold: sums of the loss times the scaler's scale."""
        rate = learning_rate(self.config.optimizer.lr, self.config.optimizer.schedule, step, self.config.steps)
        norm = float(gradient_norm(self.slots, self.mesh)) / self.scaler.scale
        applied = norm - norm == 0  # neither infinite nor not a number
        if applied:
            self._apply(rate, norm)
        elif not self.scaler.can_shrink:
            hint = "lower optimizer.lr, raise optimizer.schedule.warmup, or look at the data"
            raise DivergedError(f"step {step + 1}: the gradient norm is {norm}: the run has diverged; {hint}")
        self.scaler.update(overflow=not applied)
        return StepResult(norm, rate, applied)

    def _apply(self, rate: float, norm: float) -> None:
        divisor = self.scaler.scale * max(1.0, norm / self.config.optimizer.clip if self.config.optimizer.clip else 1.0)
        for slot, master in zip(self.slots, self.masters, strict=True):
            assert slot.parameter.grad is not None, "a slot without a gradient"
            if master is not slot.parameter:
                master.grad = slot.parameter.grad.to(master.dtype)
            if divisor != 1.0:
                assert master.grad is not None
                master.grad.div_(divisor)
        for group in self.torch.param_groups:
            group["lr"] = rate
        self.torch.step()
        self.refresh()

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights, and drop the masters' gradients."""
        for slot, master in zip(self.slots, self.masters, strict=True):
            if master is not slot.parameter:
                master.grad = None
                slot.parameter.data.copy_(master.data)

    def states(self, index: int) -> dict[str, Tensor]:
        """The weights and the state tensors of slot `index`, each [n] like the slot, by name. Views, not copies."""
        master = self.masters[index]
        tensors = {key: value for key, value in self.torch.state[master].items() if value.shape == master.shape}
        return {"weight": master.detach(), **tensors}

    def equalise(self) -> list[str]:
        """Compare, by hash, the states that replicas hold alike; broadcast the first's where they differ: which."""
        self._adopt()
        differing = []
        for index, slot in enumerate(self.slots):
            comm = self.mesh.comm(*(axis for axis in self.mesh.grid.names if axis not in slot.part_axes))
            for kind, tensor in self.states(index).items():
                if not same_everywhere(tensor, comm):
                    differing += [f"{kind} of {place.name}" for place in slot.places]
                    comm.broadcast(tensor, 0)
        self.refresh()
        return differing

    @torch.no_grad()
    def _adopt(self) -> None:
        """A master whose rounding is no longer the weight was left behind when the weight was mended: it takes it."""
        for slot, master in zip(self.slots, self.masters, strict=True):
            if not torch.equal(master.to(slot.parameter.dtype), slot.parameter):
                master.copy_(slot.parameter)

    @property
    def steps_taken(self) -> int:
        """How many steps were applied (the count of Adam's bias correction)."""
        counts = [int(state["step"]) for state in self.torch.state.values() if "step" in state]
        return max(counts, default=0)

    def prepare_states(self, steps_taken: int) -> None:
        """Make zero states as torch would at its first step, so that a checkpoint's can be copied in."""
        for master in self.masters:
            state = self.torch.state[master]
            if self.config.optimizer.name == "adamw":
                state["step"] = torch.tensor(float(steps_taken), device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            elif self.config.optimizer.name == "momentum":
                state["momentum_buffer"] = torch.zeros_like(master)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy of a half-precision one."""
    return nn.Parameter(parameter.detach().float()) if parameter.element_size() < 4 else parameter


def _torch_optimizer(config: Config, slots: list[Slot], masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    settings = config.optimizer
    groups = []
    for matrix in (True, False):
        members = [master for slot, master in zip(slots, masters, strict=True) if slot.matrix == matrix]
        groups.append({"params": members, "weight_decay": settings.weight_decay if matrix else 0.0})
    groups = [group for group in groups if group["params"]]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.epsilon, fused=True)
    momentum = settings.momentum if settings.name == "momentum" else 0.0
    return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, fused=True)
