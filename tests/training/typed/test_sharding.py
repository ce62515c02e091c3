"""The sharding of a value when the value's tensor is viewed, added, multiplied and summed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.training.typed.operators import WrongSum
from meshwright.training.typed.sharding import NONE, Sharding, cut_at, reshaped, uncut
from meshwright.training.typed.watch import Watch, part_dim


def sharding(*shape: int, partial: str = "", **cuts: int) -> Sharding:
    """Return a sharding of a shape, partial over an axis, cut by axes along dims."""
    made = Sharding(uncut(shape), frozenset([partial]) if partial else NONE)
    for axis, dim in cuts.items():
        made = cut_at(made, dim, axis)
    return made


def followed(*shardings: Sharding) -> tuple[Watch, list[Tensor]]:
    watch = Watch()
    tensors = [torch.empty([sum(s for s, _ in dim) for dim in one.dims], device="meta") for one in shardings]
    for x, one in zip(tensors, shardings, strict=True):
        watch.say(x, one)
    return watch, tensors


def test_dims_that_are_flattened_come_apart_again() -> None:
    both = sharding(2, 3, 8, data=0, tensor=1)
    flat = reshaped(both, (6, 8))
    assert flat.dims[0] == ((2, frozenset(["data"])), (3, frozenset(["tensor"])))
    assert reshaped(flat, (2, 3, 8)) == both


def test_heads_are_cut_and_each_is_whole() -> None:
    heads = reshaped(sharding(4, 12, tensor=1), (4, 3, 4))
    assert [heads.dims[at][0][1] for at in range(3)] == [NONE, frozenset(["tensor"]), NONE]


def test_one_head_or_a_new_dim_is_not_told_apart() -> None:
    assert reshaped(sharding(4, 12, tensor=1), (4, 1, 12)).varying == {"tensor"}


def test_a_product_over_a_cut_dim_is_partial() -> None:
    watch, (x, w) = followed(sharding(4, 6, tensor=1, data=0), sharding(6, 8, tensor=0))
    with watch:
        y = x @ w
        gradient = x.t() @ y.new_zeros(4, 8)
    assert watch.sharding(y).word("tensor") == "partial"
    assert watch.sharding(y).word("data") == "cut"
    assert watch.sharding(gradient).word("tensor") == "cut"
    assert watch.sharding(gradient).word("data") == "partial"


@pytest.mark.parametrize(
    "made",
    [
        lambda p, w, c: p + p,
        lambda p, w, c: p * w,
        lambda p, w, c: p / w,
        lambda p, w, c: 3 * p - p,
        lambda p, w, c: p.sum(1),
        lambda p, w, c: p + torch.zeros(4, 4, device="meta"),
        lambda p, w, c: p @ w,
        lambda p, w, c: p.masked_fill(w > 0, 0),
        lambda p, w, c: torch.cat([p, p]),
    ],
)
def test_what_is_linear_keeps_a_partial_sum(made) -> None:
    watch, tensors = followed(sharding(4, 4, partial="tensor"), sharding(4, 4), sharding(4, 4, tensor=0))
    with watch:
        result = made(*tensors)
    assert watch.sharding(result).word("tensor") == "partial"


@pytest.mark.parametrize(
    "made, shown",
    [
        (lambda p, w, c: p + w, "added to what is whole"),
        (lambda p, w, c: w - p, "added to what is whole"),
        (lambda p, w, c: p + c, "added to what is cut"),
        (lambda p, w, c: p + 1e-6, "a number is added"),
        (lambda p, w, c: p * p, "two partial sums are multiplied"),
        (lambda p, w, c: p @ p, "two partial sums are multiplied"),
        (lambda p, w, c: w / p, "division"),
        (lambda p, w, c: p.exp(), "exp"),
        (lambda p, w, c: torch.nn.functional.gelu(p), "gelu"),
        (lambda p, w, c: p.softmax(-1), "softmax"),
        (lambda p, w, c: torch.nn.functional.layer_norm(p, (4,)), "layer_norm"),
        (lambda p, w, c: p.amax(0), "amax"),
    ],
)
def test_what_is_not_linear_refuses_a_partial_sum(made, shown: str) -> None:
    watch, tensors = followed(sharding(4, 4, partial="tensor"), sharding(4, 4), sharding(4, 4, tensor=0))
    with watch, pytest.raises(WrongSum, match=shown) as raised:
        made(*tensors)
    assert raised.value.axis == "tensor"


def test_a_region_holds_what_was_written_last() -> None:
    """A bucket's gradients are written through views and read whole."""
    watch, (flat,) = followed(sharding(10))
    watch.say(flat[:4].view(2, 2), sharding(2, 2, partial="data"))
    assert watch.sharding(flat[:4]).word("data") == "partial"
    assert watch.sharding(flat).word("data") == "varying"
    watch.say(flat[4:], sharding(6, partial="data"))
    assert watch.sharding(flat).word("data") == "partial"
    watch.change(flat, lambda one, names: one.settled(["data"]))
    assert watch.sharding(flat[:4].view(2, 2)).word("data") == "whole"


def test_the_part_that_a_rank_takes_is_a_cut_of_the_dim() -> None:
    x = torch.empty(8, 6)
    assert part_dim(x.chunk(2, 0)[0], 24) == 0
    assert part_dim(x.chunk(2, 1)[0], 3) == 1
    assert part_dim(x.chunk(8, 0)[0], 6) == 0
    assert part_dim(torch.empty(4, 1, 6).chunk(2)[0], 12) == 0
