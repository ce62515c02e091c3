"""The 1-D kit (Megatron-LM, arXiv 1909.08053, section 3): heads, inner widths, vocabulary cut over the `tensor` axis.

| layer     | input     | weight              | output             | forward sends         | backward sends        |
|-----------|-----------|---------------------|--------------------|-----------------------|-----------------------|
| embedding | [B, T]    | [V/tensor, H]       | [B, T, H]          | all-reduce of output  | -                     |
| norm      | [B, T, H] | [H], [H]            | [B, T, H]          | -                     | -                     |
| expand    | [B, T, H] | [H, G, N/G/tensor]  | [B, T, G, N/G/tensor] | -                  | all-reduce of input   |
| contract  | [B, T, N/tensor] | [N/tensor, H] | [B, T, H]          | all-reduce of output  | -                     |
| transform | [B, T, H] | [H, H]              | [B, T, H]          | -                     | -                     |
| patches   | [B, T, P] | [P, H]              | [B, T, H]          | -                     | -                     |
| head      | [B, T, H] | [V/tensor, H]       | loss               | [C, 3] a chunk        | all-reduce of input   |

With sequence parallelism an activation of [B, T, H] outside of a pair is [B, T/tensor, H], and an all-reduce becomes an
all-gather on one side and a reduce-scatter on the other (sequence.py).
A transform is computed by every rank for its tokens, as Megatron-LM does with BERT's: it is one in 12 L of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.mesh import Mesh
from meshwright.shard import ZEROS, Initial, ShardedModule, ShardSpec, seed_of
from meshwright.tensor.head import HeadShape, TableHead
from meshwright.tensor.linear import bias_gradient, cast, linear, weight_gradient
from meshwright.tensor.lookup import lookup
from meshwright.tensor.sequence import CutSequence, Sequence, WholeSequence
from meshwright.tensor.serial import SerialLinear, SerialNorm


class _Expand(torch.autograd.Function):
    """y = x W + b with W cut by columns; x enters the pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: ShardedModule, sequence: Sequence) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.sequence = layer, sequence
        whole = sequence.start_enter(x).wait()  # [B, T, H]
        return torch.addmm(bias, whole.flatten(0, -2), weight).view(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        entering = ctx.layer.deferred.start(lambda: ctx.sequence.start_enter(x))  # under dx's product
        rows = dy.flatten(0, -2)
        dx = (rows @ weight.t()).view(*dy.shape[:-1], -1)
        leaving = ctx.sequence.start_leave(dx)  # under dW's product

        def write(out: Tensor, beta: int) -> None:
            torch.addmm(out, entering.wait().flatten(0, -2).t(), rows, beta=beta, out=out)

        dweight = ctx.layer.gradient("weight", weight, write)
        return leaving.wait(), dweight, bias_gradient(rows, ctx.layer), None, None


class _Contract(torch.autograd.Function):
    """y = sum over ranks of x W, + b, with W cut by rows; y leaves the pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: ShardedModule, sequence: Sequence) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.sequence = layer, sequence
        part = (x.flatten(0, -2) @ weight).view(*x.shape[:-1], -1)  # [B, T, H], one of the sum's terms
        return sequence.start_leave(part).wait().add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        entering = ctx.sequence.start_enter(dy)  # under db's sum
        dbias = bias_gradient(dy.flatten(0, -2), ctx.layer)
        whole = entering.wait().flatten(0, -2)
        dweight = weight_gradient(x.flatten(0, -2), whole, weight, ctx.layer)
        return (whole @ weight.t()).view(x.shape), dweight, dbias, None, None


class MegatronEmbedding(ShardedModule):
    """Rows of a table that is cut by rows: each rank looks up its own, the others add nothing."""

    def __init__(self, mesh: Mesh, num_rows: int, hidden: int, initial: Initial, sequence: Sequence) -> None:
        super().__init__(mesh)
        self.sequence = sequence
        self.weight = self.declare("weight", ShardSpec((num_rows, hidden), ((0, "tensor"),), initial))

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids - self.mesh.index("tensor") * self.weight.shape[0]
        mine = (rows >= 0) & (rows < self.weight.shape[0])
        part = lookup(torch.where(mine, rows, 0), self) * mine.unsqueeze(-1)
        return self.sequence.leave(part)  # [B, T, H]


class MegatronExpand(ShardedModule):
    """The first linear of a pair."""

    def __init__(self, mesh: Mesh, inputs: int, outputs: tuple[int, ...], initial: Initial, sequence: Sequence) -> None:
        super().__init__(mesh)
        self.sequence = sequence
        last = len(outputs) - 1
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), ((last + 1, "tensor"),), initial))
        self.bias = self.declare("bias", ShardSpec(outputs, ((last, "tensor"),), ZEROS, matrix=False))

    def forward(self, x: Tensor) -> Tensor:
        operands = cast(x, self.weight.flatten(1), self.bias.flatten())
        y: Tensor = _Expand.apply(*operands, self, self.sequence)
        return y.unflatten(-1, self.bias.shape) if self.bias.dim() > 1 else y


class MegatronContract(ShardedModule):
    """The second linear of a pair. Its bias is added once, to the sum."""

    def __init__(self, mesh: Mesh, inputs: int, outputs: int, initial: Initial, sequence: Sequence) -> None:
        super().__init__(mesh)
        self.sequence = sequence
        self.weight = self.declare("weight", ShardSpec((inputs, outputs), ((0, "tensor"),), initial))
        self.bias = self.declare("bias", ShardSpec((outputs,), initial=ZEROS, matrix=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Contract.apply(*cast(x, self.weight, self.bias), self, self.sequence)
        return y


class MegatronPatches(ShardedModule):
    """Every rank computes the patches that it holds."""

    def __init__(self, mesh: Mesh, inputs: int, hidden: int, initial: Initial, sequence: Sequence) -> None:
        super().__init__(mesh)
        self.sequence = sequence
        self.weight = self.declare("weight", ShardSpec((inputs, hidden), initial=initial))

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.sequence.part(x), self.weight, None, self)


class MegatronHead(TableHead):
    """Classes over the tensor axis."""

    def __init__(self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, sequence: Sequence) -> None:
        super().__init__(mesh, shape, tied, ((0, "tensor"),), ((0, "tensor"),))
        self.sequence = sequence

    def operands(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.sequence.enter(h), self.block


class MegatronKit:
    """1-D tensor parallelism over the `tensor` axis."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.sequence: Sequence = CutSequence(mesh) if sequence_parallel else WholeSequence(mesh)
        self.split_axes = self.sequence.split_axes

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        return MegatronEmbedding(self.mesh, num_rows, hidden, initial, self.sequence)

    def norm(self, hidden: int, epsilon: float) -> nn.Module:
        return SerialNorm(self.mesh, hidden, epsilon)

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1) -> nn.Module:
        outputs = (inner,) if groups == 1 else (groups, inner // groups)
        return MegatronExpand(self.mesh, hidden, outputs, initial, self.sequence)

    def contract(self, inner: int, hidden: int, initial: Initial) -> nn.Module:
        return MegatronContract(self.mesh, inner, hidden, initial, self.sequence)

    def transform(self, inputs: int, outputs: int, initial: Initial) -> nn.Module:
        return SerialLinear(self.mesh, inputs, (outputs,), initial)

    def patches(self, inputs: int, hidden: int, initial: Initial) -> nn.Module:
        return MegatronPatches(self.mesh, inputs, hidden, initial, self.sequence)

    def head_loss(
        self,
        hidden: int,
        vocabulary: int,
        padded: int,
        initial: Initial,
        tied: nn.Module | None = None,
        *,
        bias: bool = False,
    ) -> nn.Module:
        return MegatronHead(self.mesh, HeadShape(hidden, vocabulary, padded, initial, bias), tied, self.sequence)

    def local_heads(self, heads: int) -> int:
        return heads // self.mesh.size("tensor")

    def slice_batch(self, x: Tensor) -> Tensor:
        return x

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        return self._own_stream() if rate > 0 and not self.split_axes else nullcontext()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Random numbers from a stream that the common one and this rank's index begin."""
        common = int(torch.randint(2**62, ()))
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed_of(f"{common}/{self.mesh.index('tensor')}"))
            yield

    def end_step(self) -> None:
        return None
