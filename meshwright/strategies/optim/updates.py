"""One step of some weights by torch's fused kernels, for states on the device and chunks of offloaded states.

Calls torch's functions, since the constructor of torch's `Optimizer` imports torch's compiler: two seconds in every
rank.
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
    """Step with decoupled weight decay (arXiv 1711.05101). `states`: both moments; `steps_taken`: before this step."""
    first, second = states
    beta1, beta2 = settings.betas
    # torch adds 1 to the count of each weight; all counts are written by one launch.
    counts = [*torch.full((len(weights),), float(steps_taken), device=weights[0].device).unbind()]
    adamw(
        weights, gradients, first, second, [], counts, fused=True, amsgrad=False, maximize=False, beta1=beta1,
        beta2=beta2, lr=rate, weight_decay=weight_decay, eps=settings.epsilon, found_inf=skip,
    )  # fmt: skip


def sgd_step(
    settings: OptimizerSection, weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], rate: float,
    weight_decay: float, steps_taken: int, skip: Tensor | None = None,
) -> None:  # fmt: skip
    """Step by SGD, with momentum if `states` has buffers."""
    buffers: list[Tensor | None] = [*states[0]] if states else [None] * len(weights)
    sgd(
        weights, gradients, buffers, fused=True, nesterov=False, maximize=False, dampening=0.0,
        momentum=settings.momentum if states else 0.0, lr=rate, weight_decay=weight_decay, found_inf=skip,
    )  # fmt: skip
