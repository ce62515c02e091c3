"""A program in one style, right and with planted mistakes: a case of `tests.parity.styles`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parity.job import ParityJob

ALL = "(all parameters)"
DATA, TENSOR, CUT, PIPE = (("data", 2),), (("tp", 2),), (("cp", 2),), (("pipe", 2),)
BOTH = (("data", 2), ("tp", 2))
Program = Callable[[ParityJob, str], None]


@dataclass(frozen=True)
class Plant:
    """A mistake. `modules`: one of these paths, or a path inside one, must be named. `kinds`: the right names."""

    wrong: str
    modules: tuple[str, ...]
    kinds: tuple[str, ...]
    precision: str = ""


@dataclass(frozen=True)
class Style:
    """A program, the axes, the precision of typical checks of this style, and the mistakes."""

    name: str
    run: Program
    axes: tuple[tuple[str, int], ...]
    precision: str
    plants: tuple[Plant, ...] = field(default=())


STYLES: dict[str, Style] = {}


def style(
    axes: tuple[tuple[str, int], ...], *plants: tuple[str, str, str], precision: str = "float64"
) -> Callable[[Program], Program]:
    """Register a program. A plant: the name, the right modules and the right kinds, each a list of words."""

    def mark(run: Program) -> Program:
        known = tuple(Plant(wrong, _list(modules), _list(kinds)) for wrong, modules, kinds in plants)
        STYLES[run.__name__] = Style(run.__name__, run, axes, precision, known)
        return run

    return mark


def _list(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(","))


class Reduce(torch.autograd.Function):
    """Sum over a group forward, backward, or both, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool, backward: bool, factor: float) -> Tensor:
        ctx.group, ctx.backward_too, ctx.factor = group, backward, factor
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = gradients[0].clone() * ctx.factor
        if ctx.backward_too:
            dist.all_reduce(x, group=ctx.group)
        return x, None, None, None, None


def enter(x: Tensor, group: Any, factor: float = 1.0) -> Tensor:
    """Enter column-parallel linears: a copy forward, a sum backward."""
    return Reduce.apply(x, group, False, True, factor)


def leave(x: Tensor, group: Any) -> Tensor:
    """Leave row-parallel linears: a sum forward, a copy backward."""
    return Reduce.apply(x, group, True, False, 1.0)


class AllToAll(torch.autograd.Function):
    """Exchange unequal numbers of rows; backward, in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send rows to every rank by point-to-point messages, which gloo has."""
    me, size = dist.get_rank(group), dist.get_world_size(group)
    parts = list(x.contiguous().split(list(sent)))
    out = [x.new_empty((n, *x.shape[1:])) for n in received]
    out[me] = parts[me].clone()
    for step in range(1, size):
        to, source = (me + step) % size, (me - step) % size
        peers = [dist.get_global_rank(group, r) for r in (to, source)]
        operations = []
        if sent[to]:
            operations.append(dist.P2POp(dist.isend, parts[to].contiguous(), peers[0], group))
        if received[source]:
            operations.append(dist.P2POp(dist.irecv, out[source], peers[1], group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return torch.cat(out)


def sum_over(x: Tensor, group: Any) -> Tensor:
    """Return the sum of a tensor over a group; not differentiable."""
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x
