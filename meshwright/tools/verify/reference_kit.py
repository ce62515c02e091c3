"""The kit interface (tensor/kit.py) as torch's functions on whole tensors, of facts alone (a test checks imports)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import IGNORED
from meshwright.compute.parameters.role import Role
from meshwright.compute.parameters.shard import ONES, ZEROS, Initial
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.router import ExpertsShape

_Shape = tuple[int, ...]


class Layer(nn.Module):
    """A layer that computes `function(*inputs, weight, bias)` with whole parameters, named as in all kits.

    `decays`: weight decay acts on the weight. `table`: the weight is an embedding or output table. `wide`: float32
    under O2. `tied`: a layer with the same weight. `nudged`: signs of the gradient move the bias, float32 under O2.
    """

    def __init__(self, function: Callable[..., Tensor], weight: _Shape | None, initial: Initial,
                 bias: _Shape | None = None, *, decays: bool = True, wide: bool = False,
                 table: bool = False, tied: nn.Module | None = None, nudged: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.function, self.initial, self.decays, self.wide, self.nudged = function, initial, decays, wide, nudged
        self.hidden = decays and not table
        # In a tuple torch does not register the layer as a submodule, so the weight is listed only once.
        self.tied = () if tied is None else (tied,)
        self.weight = None if weight is None else nn.Parameter(torch.empty(weight))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))

    def forward(self, *inputs: Any) -> Tensor:
        weight: Any = self.tied[0].weight if self.tied else self.weight
        return self.function(*inputs, weight, self.bias)


class ReferenceKit:
    """Kit with torch's functions on whole tensors."""

    split_axes: tuple[str, ...] = ()
    parts, inner = 1, None

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}
        self.branches = self

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        return Layer(lambda ids, weight, _: F.embedding(ids, weight), (num_rows, hidden), initial, table=True)

    def linear(self, role: str, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return _linear(inputs, (outputs,), initial, biased=bias and role == "transform")

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
               heads: HeadGroups | None = None) -> nn.Module:  # fmt: skip
        return _linear(hidden, (inner,) if groups == 1 else (groups, inner // groups), initial, bias)

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return _linear(inner, (hidden,), initial, bias)

    def norm(self, width: int, epsilon: float, *, kind: str = "layer", groups: int = 1, bias: bool = True,
             inside: bool = False, over_heads: bool = False) -> nn.Module:  # fmt: skip
        def function(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
            # In the weight's precision: under O2 a norm's weight is float32 while activations are halves.
            wide = x.to(weight.dtype)
            if kind == "group":
                y = F.group_norm(wide.mT, groups, weight, shift, epsilon).mT
            elif kind.startswith("rms"):
                y = F.rms_norm(wide, (width,), weight + 1 if adds_one else weight, epsilon)
            else:
                y = F.layer_norm(wide, (width,), weight, shift, epsilon)
            return y.to(x.dtype)

        adds_one, biases = kind == "rms-around-one", (width,) if kind == "group" or (kind == "layer" and bias) else None
        return Layer(function, (width,), ZEROS if adds_one else ONES, biases, decays=False, wide=True)

    def enter(self, x: Tensor, heads: int) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, heads, -1)

    def leave(self, x: Tensor) -> Tensor:
        return x.sum(2)

    def local(self, shape: _Shape, dim: int, initial: Initial, role: Role, *, by_run: bool = False) -> nn.Module:
        decays, elements, wide = role.rule.decays, role.rule.by != "matrices", role.stored == "float32"
        return Layer(lambda weight, _: weight, shape, initial, decays=decays, table=elements, wide=wide)

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        """Return a head with whole logits [B, t, V], without the table's padding, and torch's cross entropy."""

        def function(h: Tensor, labels: Tensor, scale: Any, table: Tensor, bias: Tensor | None) -> Any:
            # Padding rows are no tokens. A layout must exclude these rows; here the table is cut before the product.
            real, smooth = slice(shape.vocabulary), shape.smoothing
            logits = F.linear(h[:, : labels.shape[1]], table[real], None if bias is None else bias[real]).flatten(0, -2)
            wide, targets = logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten()
            wide = wide if shape.cap is None else shape.cap * torch.tanh(wide / shape.cap)
            losses = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none", label_smoothing=smooth)
            return scale(losses.view(labels.shape).sum(1)) if callable(scale) else scale * losses.sum()

        sizes = None if tied is not None else (shape.padded, shape.hidden)
        return Layer(function, sizes, shape.initial, (shape.padded,) if shape.bias else None, table=True, tied=tied)

    def experts(self, shape: ExpertsShape) -> nn.Module:
        return Experts(shape)

    def local_heads(self, heads: int) -> int:
        return heads

    def slice(self, x: Tensor, where: str) -> Tensor:
        return x

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        return nullcontext()


class Experts(nn.Module):
    """Experts that compute every token each; a token's output is the gated sum over chosen experts with capacity."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        router, inner, bias = (shape.hidden, shape.count), (shape.count, shape.inner, shape.hidden), shape.linear_biases
        self.router = Layer(lambda h, weight, b: F.linear(h, weight.t(), b if bias else None), router, shape.initial,
                            router[1:] if bias or shape.biased else None, nudged=shape.biased)  # fmt: skip
        up, down = (shape.count, *shape.expand_sizes[2:]), (shape.count, shape.hidden)
        self.expand = Layer(lambda weight, _: weight, shape.expand_sizes, shape.initial, up if bias else None)
        self.contract = Layer(lambda weight, _: weight, inner, shape.last, down if bias else None)
        self.counted: Tensor | None = None  # for a balance over the batch: tokens per expert of the mean sequence
        self.counts: list[Tensor] = []  # of each pass without gradients: tokens per expert

    def low_rank(self, name: str, rank: int, first: Initial, last: Initial) -> tuple[nn.Module, nn.Module]:
        """Make A, and B that maps A to A B, an addend of the weight of the linear `name`."""
        count, inputs, *outputs = self.get_submodule(name).get_parameter("weight").shape
        b = Layer(lambda a, weight, _: torch.einsum("nir,nr...->ni...", a, weight), (count, rank, *outputs), last)
        return Layer(lambda weight, _: weight, (count, inputs, rank), first), b

    def balance_by_counts(self, factor: float) -> None:
        """Balance by the sum of all recorded counts, times a factor."""
        assert self.counts, "experts that no pass reached"
        self.counted, self.counts = torch.stack(self.counts).sum(0) * factor, []

    def forward(self, h: Tensor, places: Tensor | None = None) -> tuple[Tensor, ...]:
        shape, count = self.shape, self.shape.count
        logits, bias = self.router(h), self.router.bias if shape.biased else None
        # Rounding can change a router's choice: computed in float32 or better, as in the layouts.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = F.softmax(wide, -1) if shape.scores == "softmax" else torch.sigmoid(wide)
        taken = self._taken(scores.detach() if bias is None else scores.detach() + bias.detach())  # [B, T, n]
        loads = taken.sum((0, 1))
        self.counts += [] if torch.is_grad_enabled() else [loads]
        if bias is not None:
            scores = _Loads.apply(scores, bias, loads * count - loads.sum())
        gates = scores * taken
        if shape.renormalises:
            gates = gates / (gates.sum(-1, keepdim=True) + (0 if shape.scores == "softmax" else 1e-20))
        gates = (gates * shape.scale).to(h.dtype)
        if shape.capacity is not None and self.training:
            gates = gates * (taken.cumsum(1) <= shape.most_tokens(h.shape[1]))  # counted per sequence, by position
        up = torch.einsum("bth,nhgm->gbtnm", h, self.expand())
        up = up if self.expand.bias is None else up + self.expand.bias.transpose(0, 1)[:, None, None]
        inside = F.silu(up[0]) * up[1] if len(up) > 1 else shape.activated(up[0].unsqueeze(-2))
        if shape.clamp is not None:
            gate, linear = up[0].clamp(max=shape.clamp[1]), up[1].clamp(-shape.clamp[1], shape.clamp[1])
            inside = gate * torch.sigmoid(shape.clamp[0] * gate) * (linear + 1)
        y = torch.einsum("btnm,nmh,btn->bth", inside, self.contract(), gates)
        y = y if self.contract.bias is None else y + gates @ self.contract.bias
        return (y, self._losses(wide, scores, taken)) if shape.balance or shape.router_z else (y,)

    def _taken(self, scores: Tensor) -> Tensor:
        """Return 1 for each chosen (token, expert), else 0, [B, T, n]."""
        shape = self.shape
        if shape.groups > 1:
            best = scores.unflatten(-1, (shape.groups, -1)).sort(-1, descending=True)[0][..., :2].sum(-1)
            group_mask = F.one_hot(best.topk(shape.groups_chosen, -1)[1], shape.groups).sum(-2).bool()
            scores = scores.masked_fill(~group_mask.repeat_interleave(shape.count // shape.groups, -1), -torch.inf)
        return F.one_hot(scores.topk(shape.chosen, -1)[1], shape.count).sum(-2).to(scores.dtype)

    def _losses(self, logits: Tensor, scores: Tensor, taken: Tensor) -> Tensor:
        """Return each sequence's balance loss plus z-loss, [B]."""
        shape, loads = self.shape, taken.mean(1)  # [B, n]
        loads = loads.mean(0, keepdim=True) if shape.balance_over == "microbatch" else loads
        loads = self.counted / taken.shape[1] if shape.balance_over == "batch" and self.counted is not None else loads
        shares = scores if shape.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        balance = (loads * shares.mean(1)).sum(-1) * shape.count
        return shape.balance * balance + shape.router_z * logits.logsumexp(-1).square().mean(1)


class _Loads(torch.autograd.Function):
    """Identity on scores; the bias gets `excess` as gradient: an expert's tokens beyond the mean, times `count`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, excess: Tensor) -> Tensor:
        ctx.excess = excess.to(bias.dtype)
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.excess, None


def _linear(inputs: int, outputs: _Shape, initial: Initial, biased: bool) -> Layer:
    """Return a linear layer [..., inputs] -> [..., *outputs] with weight [inputs, *outputs]."""

    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.flatten(1).t(), None if bias is None else bias.flatten()).unflatten(-1, outputs)

    return Layer(function, (inputs, *outputs), initial, outputs if biased else None)
