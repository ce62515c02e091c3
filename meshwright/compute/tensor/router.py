"""The router: chooses k of n experts for each token, weighs their outputs, and balances the experts' loads.

    s = softmax(x R) or sigmoid(x R)      chosen: the k largest of s + b, in the groups with the highest sum of two best
                                          w_e = scale s_e, or scale s_e over the sum of the chosen

Biases b take part in the choice only: no loss has a gradient with respect to b (balance without a loss, Wang et al.,
arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A step moves each against its load:

    b_e -= rate sign(n c_e - k T)         c_e: tokens of the global batch that took e; T: its tokens

n c_e - k T is a sum over tokens, as a gradient is. So it is stored as the gradient of b, and the usual buckets sum it
over microbatches and ranks. The backward pass counts it, so that recomputed forward passes are not counted twice.

The balance of a set of tokens (Switch Transformer, arXiv 2101.03961, equation 4; without the factor 1/k of the paper
and of DeepSeek):

    balance = n Σ_e f_e P_e        f_e: (token, expert) pairs with expert e, over the number of tokens of the set
                                   P_e: the mean over the set's tokens of p_e = s_e over the sum of all s

The set is `balance_over`: one sequence (the value then does not depend on the layout), a microbatch, or the step's
global batch. For the global batch a pass without gradients counts f_e in advance (Qiu et al., arXiv 2501.11873, use
the running mean instead). The gradient flows through P only, and P is linear: the balance is the mean over sequences of
n Σ_e f_e p̄_e, with f of the set and p̄ of the sequence. If ranks hold parts of a sequence, counts are summed over the
ranks (one all-reduce of [B, n], forward), and each rank computes a part of p̄ from its own tokens.

The z-loss (ST-MoE, arXiv 2202.08906, equation 5) is the mean over tokens of log(Σ_e exp(x R))².
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.role import BIAS, ROUTER_BIAS
from meshwright.compute.parameters.shard import ZEROS, Initial, ShardedModule, ShardSpec
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.linear import linear
from meshwright.compute.tensor.products import PLAIN, Products, write_part
from meshwright.compute.tensor.swiglu import ACTIVATIONS, clamped_swiglu
from meshwright.ranks.collectives import all_reduce, start_all_reduce
from meshwright.ranks.mesh import Mesh

LEAST = 1e-20
"""Added to the sum of a token's sigmoids before the division, as in transformers: all may be zero in float32."""


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes and settings of a layer's experts.

    Attributes:
        hidden, inner: Widths of a token and inside of an expert.
        count: Number of experts.
        chosen: Experts of a token.
        renormalises: Whether a token's weights add up to `scale`.
        balance, router_z: Coefficients of the two losses.
        capacity: Tokens of a sequence that an expert takes in training, as a multiple of an even router's; None: all.
        groups, groups_chosen: Groups of experts, and the number of groups for a token.
        biased: Whether a bias takes part in the choice.
        activation: Function between an expert's linears.
        expand_groups: Outputs of the first linear for each input of the second.
        linear_biases: Whether the router's and the experts' linears have biases, which change outputs.
        clamp: Slope and limit of a clamped SwiGLU (swiglu.py); None: `activation` itself.
    """

    hidden: int
    inner: int
    count: int
    chosen: int
    renormalises: bool
    balance: float
    capacity: float | None
    initial: Initial
    last: Initial
    """Initial values of the second linear."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0
    biased: bool = False
    balance_over: Literal["sequence", "microbatch", "batch"] = "sequence"
    router_z: float = 0.0
    activation: str = "swiglu"
    expand_groups: int = 2
    linear_biases: bool = False
    clamp: tuple[float, float] | None = None

    @property
    def expand_sizes(self) -> tuple[int, int, int, int]:
        """The shape of the first linears: experts, inputs, groups, outputs of a group."""
        return self.count, self.hidden, self.expand_groups, self.inner

    def activated(self, x: Tensor) -> Tensor:
        """Apply the activation: first linear's outputs [..., groups, N] -> second linear's inputs [..., N]."""
        if self.clamp is not None:
            return clamped_swiglu(x, *self.clamp)
        return ACTIVATIONS[self.activation](x if self.expand_groups > 1 else x.squeeze(-2))

    def most_tokens(self, length: int) -> int:
        """Return C: the most tokens that an expert takes of a sequence of this length."""
        assert self.capacity is not None, "experts without a capacity"
        return min(length, math.ceil(self.capacity * self.chosen * length / self.count))


class Routed(NamedTuple):
    """A router's choice.

    Attributes:
        weights: Weights of each token's experts [B, T, k].
        ids: Numbers of each token's experts [B, T, k].
        losses: The loss of each sequence [B], or this rank's part of the loss if the context axis cuts sequences; empty
            for a router without losses.
    """

    weights: Tensor
    ids: Tensor
    losses: tuple[Tensor, ...]


class Router(ShardedModule):
    """The linear x R that scores experts; R [H, n], b [n]. With `linear_biases` the linear is x R + b."""

    def __init__(self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary, products: Products = PLAIN) -> None:
        super().__init__(mesh)
        self.shape, self.boundary, self.products = shape, boundary, products
        self.weight = self.declare("weight", ShardSpec((shape.hidden, shape.count), initial=shape.initial))
        assert not (shape.biased and shape.linear_biases), "a router has one bias: of its choice, or of its linear"
        spec = ShardSpec((shape.count,), initial=ZEROS, role=ROUTER_BIAS if shape.biased else BIAS)
        self.bias = self.declare("bias", spec) if shape.biased or shape.linear_biases else None
        self.counting = False
        """Whether the current pass only counts loads."""
        self.loads: Tensor | None = None
        """Tokens of each expert [n]: while `counting` this rank's so far, then the mean over the global batch's
        sequences, until the step ends."""

    def count(self) -> None:
        """Make the next passes count loads, from zero."""
        self.counting, self.loads = True, None

    def balance_by(self, loads: Tensor) -> None:
        """End counting, and balance by known loads.

        Args:
            loads: Tokens of each expert [n], the mean over the global batch's sequences.
        """
        self.counting, self.loads = False, loads

    def forward(self, h: Tensor) -> Tensor:
        return linear(h, self.weight, self.bias if self.shape.linear_biases else None, self, self.products)

    def route(self, logits: Tensor) -> Routed:
        """Choose the experts of tokens from logits [B, T, n]."""
        wide, scores, weights, ids = self.chosen(logits)
        if self.counting:
            loads = counts_of(ids, self.shape.count, scores.dtype).sum(0)
            self.loads = loads if self.loads is None else self.loads + loads
        has_losses = self.shape.balance or self.shape.router_z
        return Routed(weights, ids, (self._losses(wide, scores, ids),) if has_losses else ())

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the logits and scores [B, T, n], in float32 or wider, and the weights and numbers [B, T, k] of each
        token's experts."""
        shape = self.shape
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.softmax(-1) if shape.scores == "softmax" else wide.sigmoid()
        if shape.groups == 1 and not shape.biased:
            weights, ids = scores.topk(shape.chosen, -1)
        else:
            ids = self._choice(scores.detach())
            if shape.biased:
                scores = _CountLoads.apply(scores, self.bias, ids, self)
            weights = scores.gather(-1, ids)
        if shape.renormalises:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if shape.scores == "softmax" else total + LEAST)
        return wide, scores, weights * shape.scale if shape.scale != 1 else weights, ids

    def _choice(self, scores: Tensor) -> Tensor:
        """Return the numbers of the chosen experts [B, T, k]."""
        shape = self.shape
        if shape.biased and self.bias is not None:
            scores = scores + self.bias.detach()
        if shape.groups > 1:
            groups = scores.unflatten(-1, (shape.groups, -1))
            best = groups.topk(2, -1)[0].sum(-1)
            taken = torch.zeros_like(best, dtype=torch.bool)
            taken.scatter_(-1, best.topk(shape.groups_chosen, -1)[1], True)
            scores = groups.masked_fill(~taken.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(shape.chosen, -1)[1]

    def _losses(self, logits: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        """Return the sum of balance loss and z-loss of each sequence [B], times the two coefficients."""
        shape, cut = self.shape, self.cut_over
        tokens = scores.shape[1] * self.mesh.size(*cut)
        counts = logits.new_zeros(1, shape.count)
        if shape.balance:
            if shape.balance_over == "batch" and self.loads is not None and not self.counting:
                counts = self.loads.unsqueeze(0)
            else:
                # An evaluation, a plan and a counting pass use no balance over a batch: any counts will do.
                assert shape.balance_over != "batch" or self.counting or not self.training or ids.is_meta, "not counted"
                counts = counts_of(ids, shape.count, scores.dtype)  # by sequence and expert
                if cut and shape.balance_over != "batch":
                    counts = start_all_reduce(counts, self.mesh.comm(*cut)).wait()
                if shape.balance_over == "microbatch":
                    counts = counts.mean(0, keepdim=True)
        return self.summed(logits, scores, counts, tokens)

    @property
    def cut_over(self) -> tuple[str, ...]:
        """The axes with other tokens of the same sequences."""
        return tuple(axis for axis in self.mesh.grid.names if axis in (*self.boundary.split_axes, "context"))

    def summed(self, logits: Tensor, scores: Tensor, counts: Tensor, tokens: int) -> Tensor:
        """Sum the losses of tokens (`loss_of`) over each sequence [B], over this rank's part of the context axis."""
        losses = self.loss_of(logits, scores, counts, tokens).sum(1)
        for axis in self.boundary.split_axes:  # ranks of these axes continue with one loss
            losses = all_reduce(losses, self.mesh, axis)
        return losses

    def loss_of(self, logits: Tensor, scores: Tensor, counts: Tensor, tokens: int) -> Tensor:
        """Return each token's share of the two losses [B, t].

        Args:
            logits: [B, t, n].
            scores: [B, t, n].
            counts: Tokens of each expert, [B, n] or [1, n].
            tokens: Tokens of a sequence.
        """
        shape, losses = self.shape, logits.new_zeros(logits.shape[:2])
        if shape.balance:
            shares = scores if shape.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + LEAST)
            losses = losses + (counts.unsqueeze(1) * shares).sum(2) * (shape.balance * shape.count / tokens**2)
        if shape.router_z:
            losses = losses + logits.logsumexp(-1).square() * (shape.router_z / tokens)
        return losses


@contextmanager
def counted_loads(model: nn.Module, mesh: Mesh, sequences: int) -> Iterator[None]:
    """Count the loads of all routers in the passes inside, then balance by the loads.

    Sends one all-reduce of [routers, n] over the axes that split tokens.

    Args:
        model: The model or a chunk.
        mesh: The rank's mesh.
        sequences: Sequences of the global batch.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.count()
    yield
    loads = [router.loads for router in routers if router.loads is not None]
    assert len(loads) == len(routers), "a router that no pass reached"
    if loads:  # a stage may have no router, and then none of the stage's ranks has one
        total = torch.stack(loads).double()  # whole numbers, whose sum is exact in any order of ranks
        mesh.comm(*mesh.token_axes).all_reduce(total)
        for router, load in zip(routers, (total / sequences).to(loads[0].dtype), strict=True):
            router.balance_by(load)


class _CountLoads(torch.autograd.Function):
    """Identity of the scores. The backward pass adds n c_e - k T of these tokens to the bias's gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, ids: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(ids, bias)
        ctx.router = router
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ids, bias = ctx.saved_tensors
        count = bias.numel()
        loads = counts_of(ids, count, bias.dtype).sum(0)
        excess = loads * count - ids.numel()
        return gradient, ctx.router.add_gradient("bias", bias, partial(write_part, excess)), None, None


def counts_of(ids: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Count the tokens of each sequence and expert: ids [B, T, k] -> [B, n]."""
    counts = torch.zeros(ids.shape[0], count, dtype=dtype, device=ids.device)
    return counts.scatter_add_(1, ids.flatten(1), torch.ones_like(ids, dtype=dtype).flatten(1))
