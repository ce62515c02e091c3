"""Norms, computed in float32 or better. A rank holds the whole hidden dim, or whole groups of channels.

| norm  | of             | over                        | weights   |
|-------|----------------|-----------------------------|-----------|
| layer | [B, T, H]      | H                           | [H], [H]  |
| rms   | [B, T, H]      | H; no mean (arXiv 1910.07467) | [H]     |
| group | [B, T, H]      | T and the channels of a group (arXiv 1803.08494) | [H], [H] |

Layer norm over a hidden dim that is sharded over an axis (`SplitLayerNorm`):

forward:  sums of x and x² over H: one all-reduce of [R, 2]      x̂ = (x - mean) / sqrt(variance + ε),  y = x̂ γ + β
backward: sums of dx̂ and dx̂ x̂ over H: one all-reduce of [R, 2]   dx = (dx̂ - mean(dx̂) - x̂ mean(dx̂ x̂)) / sqrt(...)

R rows. (Tesseract, section 3.2.2.) Forward sums are float64: E[x²] - E[x]² would lose float32's digits if the mean is
large. Sums are computed in the memory of the all-reduce and updated in place, since a GPU's time for such small kernels
depends on the number of kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.role import NORM
from meshwright.compute.parameters.shard import ONES, ZEROS, Placements, Shard, ShardedModule, ShardSpec
from meshwright.compute.tensor.fused import UsesFused
from meshwright.ranks.collectives import all_reduce, all_reduce_gradient
from meshwright.ranks.comm import Comm
from meshwright.ranks.mesh import Mesh


def kernel_operands(h: Tensor, device_type: str, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return h and weights in one dtype, as operands of torch's norms.

    A GPU's kernels add in float32 for inputs of any dtype, so there the few weights are rounded and h is not cast. A
    CPU's kernels add the weights' gradients in half precision (error 5.9 in sums of about 32, of 1,024 bf16 rows), so
    there h is cast to the weights' dtype. Compiled graphs cast h on every device, since a fused cast costs no pass.
    """
    if device_type == "cuda" and not torch.compiler.is_compiling():
        return h, *(weight.to(h.dtype) for weight in weights)
    return h.to(weights[0].dtype), *weights


OneWidth = Literal["layer", "rms", "rms-around-one"]
"""Norms over one width; around one: the weight is added to 1, and begins at 0."""


class Norm(ShardedModule, UsesFused):
    """Layer norm over the last dim, or x / sqrt(mean(x^2) + epsilon) · weight (rms).

    Computed in float32 or better; the output has the dtype of the input.
    """

    in_graphs = True

    def __init__(
        self, mesh: Mesh, width: int, epsilon: float, norm_kind: OneWidth = "layer", *, bias: bool = True,
        heads_over: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Make the norm. `heads_over`: the axes that shard the heads, for a norm over a head's width."""
        super().__init__(mesh)
        self.kind, self.epsilon, self.around_one = norm_kind, epsilon, norm_kind == "rms-around-one"
        initial = ZEROS if self.around_one else ONES
        spec = ShardSpec((width,), initial=initial, role=NORM, partial_over=heads_over)
        self.weight = self.declare("weight", spec)
        self.bias = self.declare("bias", replace(spec, initial=ZEROS)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        if self.fused is not None and torch.compiler.is_compiling():
            weight = self.weight + 1 if self.around_one else self.weight
            return self.fused.norm(h, weight, self.bias, self.epsilon, self.kind == "layer")
        if self.around_one:  # without rounding of the sum, as in transformers
            return self.normed(h.to(self.weight.dtype), self.weight + 1, None).to(h.dtype)
        biases = () if self.bias is None else (self.bias,)
        x, weight, *cast = kernel_operands(h, self.mesh.device_type, self.weight, *biases)
        return self.normed(x, weight, cast[0] if cast else None).to(h.dtype)

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return norm(x) · weight + bias; all have one dtype."""
        return self.of_unit_scale(x, weight.shape, weight, bias)

    def of_unit_scale(
        self, x: Tensor, shape: torch.Size, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Norm x over the last dim, of shape `shape`."""
        if self.kind == "layer":
            return F.layer_norm(x, shape, weight, bias, self.epsilon)
        return F.rms_norm(x, shape, weight, self.epsilon)


class CutRmsNorm(ShardedModule):
    """RMS norm over a width that is sharded over an axis, in float32 or better.

    Sent over the axis, forward and backward: [B, T, 1].
    """

    def __init__(self, mesh: Mesh, width: int, epsilon: float, axis: str, norm_kind: OneWidth) -> None:
        """Make the norm. `norm_kind`: rms, or rms-around-one."""
        super().__init__(mesh)
        self.width, self.epsilon, self.axis, self.around_one = width, epsilon, axis, norm_kind == "rms-around-one"
        initial = ZEROS if self.around_one else ONES
        self.weight = self.declare("weight", ShardSpec((width,), {axis: Shard(0)}, initial, NORM))

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(self.weight.dtype)
        squares = all_reduce(x.square().sum(-1, keepdim=True), self.mesh, self.axis)
        mean = all_reduce_gradient(squares, self.mesh, self.axis) / self.width
        weight = self.weight + 1 if self.around_one else self.weight
        return (x * torch.rsqrt(mean + self.epsilon) * weight).to(h.dtype)


class GroupNorm(ShardedModule):
    """Norm of the channels of each group by the mean and variance of the group over all positions.

    `placements`: of the channels; a rank holds whole groups.
    """

    def __init__(self, mesh: Mesh, channels: int, groups: int, epsilon: float, placements: Placements) -> None:
        super().__init__(mesh)
        self.groups, self.epsilon = groups // mesh.size(*placements), epsilon
        self.weight = self.declare("weight", ShardSpec((channels,), placements, ONES, NORM))
        self.bias = self.declare("bias", ShardSpec((channels,), placements, ZEROS, NORM))

    def forward(self, h: Tensor) -> Tensor:
        x, weight, bias = kernel_operands(h, self.mesh.device_type, self.weight, self.bias)
        y = F.group_norm(x.transpose(1, 2), self.groups, weight, bias, self.epsilon)  # [B, H, T]
        return y.transpose(1, 2).to(h.dtype)


class SplitLayerNorm(torch.autograd.Function):
    """Layer norm of x [..., H/n] over all `hidden` elements; weight and bias [H/n], float32 or float64.

    A narrower x is read, and y is written in the dtype of x, without rounding in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, hidden: int, epsilon: float, comm: Comm) -> Tensor:
        sums = x.new_empty(*x.shape[:-1], 2, dtype=torch.float64)
        mean, square = sums.unbind(-1)
        torch.sum(x, -1, dtype=torch.float64, out=mean)
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64, out=square).square_()
        comm.all_reduce(sums)
        sums.div_(hidden)
        square.addcmul_(mean, mean, value=-1).clamp_(min=0).add_(epsilon).rsqrt_()
        mean, scale = sums.to(weight.dtype).split(1, -1)
        normed = (x - mean).mul_(scale)
        ctx.save_for_backward(normed, scale, weight)
        ctx.hidden, ctx.comm = hidden, comm
        return torch.addcmul(bias, normed, weight, out=torch.empty_like(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        dnormed = dy * weight
        product = dy * normed
        sums = dnormed.new_empty(dnormed[..., 0].numel(), 2)  # by row: the sums of dnormed and of dnormed · normed
        torch.sum(dnormed.flatten(0, -2), -1, out=sums[:, 0])
        torch.mv(product.flatten(0, -2), weight, out=sums[:, 1])
        moving = ctx.comm.all_reduce(sums, wait=False)  # under the vectors' gradients
        dweight = product.flatten(0, -2).sum(0)
        dbias = dy.flatten(0, -2).sum(0)
        moving.wait()
        mean, projection = sums.div_(ctx.hidden).view(*dy.shape[:-1], 2).split(1, -1)
        dnormed.sub_(mean).addcmul_(normed, projection, value=-1)
        dx = torch.mul(dnormed, scale, out=torch.empty_like(dy))
        return dx, dweight, dbias, None, None, None
