"""Islands: element-wise work between two products that pays to be compiled, as pure functions of tensors.

torch.compile of a whole block breaks at each linear, which writes its gradient where buckets hold it. So the products,
deferred gradients and collectives stay as they are, and Inductor compiles what stands between them, for all kits alike.
`python -m benchmarks.islands`, both ways on a CPU's thread: GELU of [1024, 1024] takes 3.5 ms and compiled 1.9 (torch
3.6), the loss of 256 tokens over 8,192 classes 17.6 and 15.9 (torch 22.2); a residual sum with a norm takes 2.1 ms by
torch and compiled 3.2, so it is no island. On a GPU the loss's passes move 6 bytes a half-precision logit instead of
18, by counting; an H100's step of GPT-2 small took 161 ms with islands and 202 without (benchmarks/one_gpu.py).

The loss of a rank's classes, logits [C, V/p] of which the first `held` are real: two passes, an exchange between them.

| pass      | gives                                                                                               |
|-----------|-----------------------------------------------------------------------------------------------------|
| statistics| [C, 3]: the greatest logit m, Σ exp(logit - m), the target's product with the logits                |
| gradients | exp(logit - m) · scale, less the target's part: `targeted` in its column, `equal` · factor in all   |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from meshwright.config import Config

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def label_statistics(logits: Tensor, columns: Tensor, certain: Tensor, equal: Tensor, held: int) -> Tensor:
    """The first pass, [C, 3] in the dtype of `certain`. It reads the logits and writes nothing of their size.

    `equal` is a tensor, since torch 2.13 once took the graph of another number for this one where it was a float.
    """
    real = logits[:, :held].to(certain.dtype)
    top = real.amax(1, keepdim=True)
    picked = real.gather(1, columns) * certain + real.sum(1, keepdim=True) * equal
    return torch.cat([top, (real - top).exp().sum(1, keepdim=True), picked], 1)


def label_gradients(
    logits: Tensor, top: Tensor, columns: Tensor, certain: Tensor, equal: Tensor, scale: Tensor, factor: Tensor,
    held: int,
) -> None:  # fmt: skip
    """The second pass: logits become their gradients, in place; padding's are 0."""
    shares = (logits.to(top.dtype) - top).exp() * scale
    place = torch.arange(logits.shape[1], device=logits.device)
    targets = torch.where(place == columns, certain + equal, equal) * factor
    logits.copy_(torch.where(place < held, shares - targets, 0))


def gelu_with_derivative(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU in its tanh form and its derivative (gelu.py)."""
    square = x * x
    gate = torch.sigmoid((square * CUBIC + LINEAR) * x)
    value = x * gate
    rest = (square * (3 * CUBIC) + LINEAR) * value
    return value, rest - rest * gate + gate


@dataclass(frozen=True)
class Islands:
    """The functions, as Inductor compiles them at their first call."""

    statistics: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]
    gelu: Callable[[Tensor], tuple[Tensor, Tensor]]


def compiled_islands() -> Islands:
    """Imports torch's compiler, 2 s a rank, so only here. Compiles in this process: the functions are too small for a
    pool."""
    settings: dict[str, Any] = {"fullgraph": True, "options": {"compile_threads": 1}}
    return Islands(
        torch.compile(label_statistics, **settings),
        torch.compile(label_gradients, **settings),
        torch.compile(gelu_with_derivative, **settings),
    )


class UsesIslands:
    """A module that uses compiled functions if it is given them."""

    islands: Islands | None = None

    def use_islands(self, islands: Islands) -> None:
        """Use compiled functions from now on.

        Args:
            islands: the functions by name.
        """
        self.islands = islands


def apply(config: Config, model: nn.Module) -> None:
    """Let all modules of a model use compiled functions (`compile: islands`)."""
    islands = compiled_islands()
    for module in model.modules():
        if isinstance(module, UsesIslands):
            module.use_islands(islands)
