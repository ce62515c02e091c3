"""The serial kit: one device, whole tensors. The oracle that every other kit is compared with.

| layer     | input     | weight        | output        | sends |
|-----------|-----------|---------------|---------------|-------|
| embedding | [B, T]    | [V, H]        | [B, T, H]     | -     |
| patches   | [B, T, I] | [I, H]        | [B, T, H]     | -     |
| norm      | [B, T, H] | [H], [H]      | [B, T, H]     | -     |
| expand    | [B, T, H] | [H, G, N/G]   | [B, T, G, N/G]| -     |
| contract  | [B, T, N] | [N, H]        | [B, T, H]     | -     |
| transform | [B, t, H] | [H, H]        | [B, t, H]     | -     |
| scores    | [B, T, H] | [H, n]        | [B, T, n]     | -     |
| head      | [B, T, H] | [V, H]        | loss          | -     |
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.bits.blocks import WHOLE, Blocks
from meshwright.parameters.shard import ONES, ZEROS, Initial, ShardedModule, ShardSpec
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.copies import HeadGroups
from meshwright.tensor.cross_entropy import chunked_token_losses
from meshwright.tensor.experts import Experts, ExpertsShape
from meshwright.tensor.head import HeadShape, TableHead
from meshwright.tensor.kit import LinearPair
from meshwright.tensor.linear import Local, linear, lookup
from meshwright.tensor.norms import GroupNorm, RmsNorm, kernel_operands, scaled_by_block


class SerialEmbedding(ShardedModule):
    """Rows of a table."""

    def __init__(self, mesh: Mesh, num_rows: int, hidden: int, initial: Initial) -> None:
        super().__init__(mesh)
        self.weight = self.declare("weight", ShardSpec((num_rows, hidden), initial=initial, table=True))

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(ids, self)  # [B, T, H]


class SerialPatches(ShardedModule):
    """x W; W [inputs, H]."""

    def __init__(self, mesh: Mesh, inputs: int, hidden: int, initial: Initial) -> None:
        super().__init__(mesh)
        self.weight = self.declare("weight", ShardSpec((inputs, hidden), initial=initial))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None, self)  # [B, T, H]


class SerialNorm(ShardedModule):
    """Layer norm in float32 or better, whatever the precision of its input; the output has the input's."""

    def __init__(self, mesh: Mesh, hidden: int, epsilon: float, *, bias: bool = True, blocks: Blocks = WHOLE) -> None:
        super().__init__(mesh)
        self.epsilon, self.blocks = epsilon, blocks
        self.affine_apart = False
        """Whether weight and bias are applied by operations of their own, whose gradients are sums over rows: those of
        torch's kernel are added thread by thread, and end with other bits where threads are more."""
        self.weight = self.declare("weight", ShardSpec((hidden,), initial=ONES, matrix=False, full_precision=True))
        spec = ShardSpec((hidden,), initial=ZEROS, matrix=False, full_precision=True)
        self.bias = self.declare("bias", spec) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        biases = () if self.bias is None else (self.bias,)
        x, weight, *cast = kernel_operands(h, self.mesh.device_type, self.weight, *biases)
        if self.blocks.exact:
            normed = F.layer_norm(x, weight.shape, None, None, self.epsilon)
            return scaled_by_block(normed, self, self.bias, self.blocks.outer_runs).to(h.dtype)
        if self.affine_apart:
            y = F.layer_norm(x, weight.shape, None, None, self.epsilon) * weight
            return (y + cast[0] if cast else y).to(h.dtype)
        return F.layer_norm(x, weight.shape, weight, cast[0] if cast else None, self.epsilon).to(h.dtype)


class SerialLinear(ShardedModule):
    """x W + b over the last dim of x; W [in, G, out/G]."""

    def __init__(
        self, mesh: Mesh, inputs: int, outputs: tuple[int, ...], initial: Initial, *, bias: bool = True,
        blocks: Blocks = WHOLE,
    ) -> None:  # fmt: skip
        super().__init__(mesh)
        self.blocks = blocks
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), initial=initial))
        self.bias = self.declare("bias", ShardSpec(outputs, initial=ZEROS, matrix=False)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight.flatten(1), None if self.bias is None else self.bias.flatten(), self, self.blocks)
        return y.unflatten(-1, self.weight.shape[1:]) if self.weight.dim() > 2 else y


class SerialHead(TableHead):
    """The whole table: padding rows are never seen."""

    def token_losses(self, h: Tensor, labels: Tensor) -> Tensor:
        vocabulary = self.classes.vocabulary
        losses = chunked_token_losses(h.flatten(0, -2), self.block, self.bias, labels.flatten(), vocabulary)
        return losses.view(labels.shape)

    def logits(self, h: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[: self.classes.vocabulary]
        return F.linear(h, self.block[: self.classes.vocabulary], bias)


class SerialKit:
    """One device."""

    split_axes: tuple[str, ...] = ()
    parts = 1

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        return SerialEmbedding(self.mesh, num_rows, hidden, initial)

    def patches(self, inputs: int, hidden: int, initial: Initial) -> nn.Module:
        return SerialPatches(self.mesh, inputs, hidden, initial)

    def norm(self, hidden: int, epsilon: float, *, bias: bool = True) -> nn.Module:
        return SerialNorm(self.mesh, hidden, epsilon, bias=bias)

    def rms_norm(self, hidden: int, epsilon: float) -> nn.Module:
        return RmsNorm(self.mesh, hidden, epsilon)

    def group_norm(self, channels: int, groups: int, epsilon: float) -> nn.Module:
        return GroupNorm(self.mesh, channels, groups, epsilon, {})

    def head_norm(self, width: int, epsilon: float) -> nn.Module:
        return RmsNorm(self.mesh, width, epsilon)

    def local_group_norm(self, channels: int, groups: int, epsilon: float) -> nn.Module:
        return GroupNorm(self.mesh, channels, groups, epsilon, {})

    def local(self, shape: tuple[int, ...], dim: int, initial: Initial, *, matrix: bool) -> nn.Module:
        return Local(self.mesh, ShardSpec(shape, initial=initial, matrix=matrix))

    @property
    def branches(self) -> LinearPair:
        return self

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        outputs = (inner,) if groups == 1 else (groups, inner // groups)
        return SerialLinear(self.mesh, hidden, outputs, initial, bias=bias)

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return SerialLinear(self.mesh, inner, (hidden,), initial, bias=bias)

    def transform(self, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return SerialLinear(self.mesh, inputs, (outputs,), initial, bias=bias)

    def scores(self, hidden: int, outputs: int, initial: Initial) -> nn.Module:
        return SerialLinear(self.mesh, hidden, (outputs,), initial, bias=False)

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return SerialHead(self.mesh, shape, tied, {}, {})

    def experts(self, shape: ExpertsShape) -> nn.Module:
        return Experts(self.mesh, shape)

    def shared_heads(self, hidden: int, groups: HeadGroups, initial: Initial, *, bias: bool) -> nn.Module:
        raise AssertionError("one rank has all heads")

    def local_heads(self, heads: int) -> int:
        return heads

    def slice_batch(self, x: Tensor) -> Tensor:
        return x

    def slice_inside(self, x: Tensor) -> Tensor:
        return x

    def slice_hidden(self, x: Tensor) -> Tensor:
        return x

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        return nullcontext()

    def end_step(self) -> None:
        return None
