"""States on the device, beside the slots: torch's optimizer over the masters, all slots in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from meshwright.bucket import Slot
from meshwright.config import Config


class InPlace:
    """Every slot's master and moments, whole. A step is taken when all gradients are there."""

    streams = False

    def __init__(self, config: Config, slots: Sequence[Slot]) -> None:
        self.config = config
        self.slots = slots
        self.masters = [_master(slot.parameter) for slot in slots]
        self.torch = _torch_optimizer(config, slots, self.masters)

    def step(self, indices: Iterable[int], rate: float, divisor: float, steps_taken: int) -> None:
        for index in indices:
            parameter, master = self.slots[index].parameter, self.masters[index]
            assert parameter.grad is not None, "a slot without a gradient"
            if master is not parameter:
                master.grad = parameter.grad.to(master.dtype)
            if divisor != 1.0:
                assert master.grad is not None
                master.grad.div_(divisor)
        for group in self.torch.param_groups:
            group["lr"] = rate
        self.torch.step()
        self.refresh()

    def tensors(self, index: int) -> dict[str, Tensor]:
        master = self.masters[index]
        moments = {key: value for key, value in self.torch.state[master].items() if value.shape == master.shape}
        return {"weight": master.detach(), **moments}

    def prepare(self, steps_taken: int) -> None:
        for master in self.masters:
            state = self.torch.state[master]
            if self.config.optimizer.name == "adamw":
                state["step"] = torch.tensor(float(steps_taken), device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            elif self.config.optimizer.name == "momentum":
                state["momentum_buffer"] = torch.zeros_like(master)

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


def _torch_optimizer(config: Config, slots: Sequence[Slot], masters: list[nn.Parameter]) -> torch.optim.Optimizer:
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
