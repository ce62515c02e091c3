"""Muon (Jordan et al., 2024): a hidden layer's matrix is stepped along its momentum, made orthogonal.

    M <- momentum M + (1 - momentum) G      O = orthogonal((1 - momentum) G + momentum M)
    W <- (1 - rate decay) W - 0.2 sqrt(max(rows, columns)) rate O

The factor gives O the root mean square of an AdamW step (Moonlight, arXiv 2502.16982), so one rate serves both. All
other parameters (tables of tokens and classes, biases, norms) are stepped by AdamW. Unlike all other optimizers here,
`orthogonal` needs the whole matrix on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.config.schema import OptimizerSection

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The published coefficients of a quintic; five iterations move every singular value near 1."""
ITERATIONS = 5
AS_ADAMW = 0.2


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about U Vᵀ of a matrix U S Vᵀ, by Newton-Schulz iterations X <- a X + (b A + c A²) X with A = X Xᵀ.

    In the matrix's precision: in half precision, two right programs would differ by no less than a right and a wrong
    one.
    """
    a, b, c = COEFFICIENTS
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix  # the shorter side is squared
    # After dividing by the Frobenius norm no singular value is above 1, so the iteration converges; zeros stay zeros.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.t()
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def muon_step(
    settings: OptimizerSection, weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]], rate: float,
    weight_decay: float, steps_taken: int, skip: Tensor | None = None,
) -> None:  # fmt: skip
    """Step matrices [rows, columns] by their momentum, the only state."""
    (averages,) = states
    for weight, gradient, average in zip(weights, gradients, averages, strict=True):
        # If skipped, the average is interpolated with itself, unchanged; multiplying by 0 would keep a NaN.
        finite = gradient if skip is None else gradient.where(skip == 0, average)
        average.lerp_(finite, 1 - settings.momentum)
        # Nesterov's momentum: the gradient is added to the running average once more.
        direction = orthogonal(finite.lerp(average, settings.momentum))
        decay: float | Tensor = rate * weight_decay
        if skip is not None:
            applied = 1 - skip.double()  # in float64, so that an applied step has the bits of one without `skip`
            direction, decay = direction * applied, decay * applied
        weight.mul_(1 - decay)
        weight.add_(direction, alpha=-rate * AS_ADAMW * math.sqrt(max(weight.shape)))


class Muon(torch.optim.Optimizer):
    """Muon in plain torch; each group says whether its parameters are `hidden` layers' matrices."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, **adamw: Any) -> None:
        listed = list(groups)  # torch keeps these dicts: a rate set here is AdamW's, too
        self._rest = torch.optim.AdamW([group for group in listed if not group["hidden"]], lr=lr, **adamw)
        super().__init__(listed, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self._rest.step()
        for group in (group for group in self.param_groups if group["hidden"]):
            for parameter in group["params"]:
                gradient, state, momentum = parameter.grad.flatten(1), self.state[parameter], group["momentum"]
                before = state.get("exp_avg", torch.zeros_like(parameter)).flatten(1)
                average = momentum * before + (1 - momentum) * gradient
                state["exp_avg"] = average.view_as(parameter)
                x = momentum * average + (1 - momentum) * gradient
                x = x / torch.linalg.matrix_norm(x)
                for _ in range(ITERATIONS):  # from the right: the same polynomial of the singular values
                    inner = x.mT @ x
                    x = x @ (
                        COEFFICIENTS[0] * torch.eye(len(inner), dtype=x.dtype, device=x.device)
                        + COEFFICIENTS[1] * inner
                        + COEFFICIENTS[2] * inner @ inner
                    )
                size = AS_ADAMW * max(x.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * size * x.view_as(parameter))
