"""Islands: element-wise work between two products that is worth compiling, as pure functions of tensors.

torch.compile of a whole block breaks at each linear, since linears write gradients into buckets. Products, deferred
gradients and collectives are therefore not compiled. Inductor compiles the functions between them, equal for all kits.
`python -m benchmarks.islands`, both ways on a CPU's thread: GELU of [1024, 1024] takes 3.2 ms and compiled 1.9 (torch
4.2), the smoothed loss of 256 tokens over 8,192 classes 8.4 and 8.5 (torch 8.6; without smoothing one softmax is
3.7, torch 5.8). A residual sum with a norm takes 2.5 ms by torch and compiled 3.5, so it is no island. On a GPU the
loss's passes move 6 bytes a half-precision logit instead of 18, by counting; an H100's step of GPT-2 small took 161 ms
with islands and 202 without (benchmarks/one_gpu.py).

The loss of a rank's classes: logits [C, V/p], the first `held` columns real. It takes two passes with an exchange
between. A rank with all classes needs one pass: the kernel reads a row from GPU memory once, then from the cache.

| pass      | gives                                                                                               |
|-----------|-----------------------------------------------------------------------------------------------------|
| statistics| [C, 3]: the greatest logit m, Σ exp(logit - m), the target's product with the logits                |
| gradients | exp(logit - m) · scale, less the target's part: `targeted` in its column, `equal` · factor in all   |
| losses    | [C, 1]: each token's loss; logits become their gradients                                            |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.compute.tensor.compiler import start_compiler

if TYPE_CHECKING:
    from meshwright.config import Config

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def label_statistics(logits: Tensor, columns: Tensor, certain: Tensor, equal: Tensor, held: int) -> Tensor:
    """Compute the first pass, [C, 3] in the dtype of `certain`, without a write of the logits' size.

    `equal` is a tensor: as a float, torch 2.13 once used the compiled graph of another number.
    """
    real = logits[:, :held].to(certain.dtype)
    top = real.amax(1, keepdim=True)
    picked = real.gather(1, columns) * certain + real.sum(1, keepdim=True) * equal
    return torch.cat([top, (real - top).exp().sum(1, keepdim=True), picked], 1)


def label_gradients(
    logits: Tensor, top: Tensor, columns: Tensor, certain: Tensor, equal: Tensor, scale: Tensor, factor: Tensor,
    held: int,
) -> None:  # fmt: skip
    """Run the second pass: overwrite logits with gradients; padding gets 0."""
    shares = (logits.to(top.dtype) - top).exp() * scale
    indices = torch.arange(logits.shape[1], device=logits.device)
    targets = torch.where(indices == columns, certain + equal, equal) * factor
    logits.copy_(torch.where(indices < held, shares - targets, 0))


def label_losses(logits: Tensor, columns: Tensor, certain: Tensor, equal: Tensor, factor: Tensor, held: int) -> Tensor:
    """Run both passes for all classes: losses [C, 1] in the dtype of `certain`; gradients overwrite the logits."""
    indices = torch.arange(logits.shape[1], device=logits.device)
    wide, real, labelled = logits.to(certain.dtype), indices < held, indices == columns
    # Padding is masked, not sliced off: sums over fewer columns than are written would need a separate kernel.
    masked = torch.where(real, wide, -torch.inf)
    top = masked.amax(1, keepdim=True)
    total = (masked - top).exp().sum(1, keepdim=True).log() + top
    picked = torch.where(labelled, wide * certain, 0).sum(1, keepdim=True)
    picked = picked + torch.where(real, wide, 0).sum(1, keepdim=True) * equal
    targets = torch.where(labelled, certain + equal, equal) * factor
    logits.copy_(torch.where(real, (wide - total).exp() * factor - targets, 0))
    return total - picked


def gelu_with_derivative(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU in the tanh form and the derivative (gelu.py)."""
    square = x * x
    gate = torch.sigmoid((square * CUBIC + LINEAR) * x)
    value = x * gate
    rest = (square * (3 * CUBIC) + LINEAR) * value
    return value, rest - rest * gate + gate


@dataclass(frozen=True)
class Islands:
    """Table of the islands' functions, compiled or plain."""

    statistics: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]
    losses: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    gelu: Callable[[Tensor], tuple[Tensor, Tensor]]


def islands_of(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Islands:
    """Apply `make` to each function and return the table."""
    return Islands(make(label_statistics), make(label_gradients), make(label_losses), make(gelu_with_derivative))


def compiled_islands(device: str = "cpu") -> Islands:
    """Return functions that Inductor compiles for a device at the first call.

    The import of torch's compiler takes 2 s per rank, so only this function does it. Triton compiles in this process:
    the kernels are too small for a pool.
    """
    options = None if device == "cpu" else {"compile_threads": 1}
    return islands_of(partial(torch.compile, fullgraph=True, backend=start_compiler(device), options=options))


class UsesIslands:
    """Module that uses compiled functions after a call of `use_islands`."""

    islands: Islands | None = None

    def use_islands(self, islands: Islands) -> None:
        """Use compiled functions from now on.

        Args:
            islands: the functions by name.
        """
        self.islands = islands


def apply(config: Config, model: nn.Module) -> None:
    """Let all modules of a model use compiled functions (`compile: islands`)."""
    islands = compiled_islands(config.device)
    for module in model.modules():
        if isinstance(module, UsesIslands):
            module.use_islands(islands)
