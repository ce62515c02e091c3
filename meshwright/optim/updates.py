"""One step of some weights: torch's fused kernels, for states in place and for pieces of offloaded ones alike.

The step is torch's own function and not its `Optimizer` class, whose constructor imports torch's compiler: two seconds
of a core in every rank, for nothing that a step needs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from meshwright.config.schema import OptimizerSection


def adamw_step(
    settings: OptimizerSection, weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], rate: float,
    weight_decay: float, steps_taken: int, skip: Tensor | None = None,
) -> None:  # fmt: skip
    """Decoupled weight decay (arXiv 1711.05101). `states`: a list by name, like `weights`; `steps_taken` before it."""
    first, second = states
    beta1, beta2 = settings.betas
    # One count a weight: torch adds this step to each.
    counts = [torch.full((), float(steps_taken), device=weight.device) for weight in weights]
    adamw(
        weights, gradients, first, second, [], counts, fused=True, amsgrad=False, maximize=False, beta1=beta1,
        beta2=beta2, lr=rate, weight_decay=weight_decay, eps=settings.epsilon, found_inf=skip,
    )  # fmt: skip


def sgd_step(
    settings: OptimizerSection, weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], rate: float,
    weight_decay: float, steps_taken: int, skip: Tensor | None = None,
) -> None:  # fmt: skip
    """SGD; with a state, of momentum."""
    buffers: list[Tensor | None] = [*states[0]] if states else [None] * len(weights)
    sgd(
        weights, gradients, buffers, fused=True, nesterov=False, maximize=False, dampening=0.0,
        momentum=settings.momentum if states else 0.0, lr=rate, weight_decay=weight_decay, found_inf=skip,
    )  # fmt: skip
