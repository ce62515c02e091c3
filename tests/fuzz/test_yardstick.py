"""In half precision, too, the fuzzing sees mistakes: in sums, in gradients, in the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.parameters import rounding
from meshwright.compute.parameters.bucket import Bucket
from meshwright.compute.parameters.shard import Box, ShardSpec
from meshwright.compute.tensor.products import Products
from meshwright.config import Config
from meshwright.config.load import parse_run
from meshwright.ranks.comm import Comm, Work
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.policies import Zero1
from meshwright.strategies.optim.states import InPlace
from tests.fuzz.axes import AXES, Case, Value, tree_of
from tests.fuzz.check import Plant, mistakes
from tests.tools.verify.mistakes import decayed_vectors, wrong_bias_correction, wrong_clipping

PLAIN: Case = {axis: values[0] for axis, values in AXES.items()} | {"layers": 1, "heads": 4, "vocabulary": "whole"}


def halved_zero1() -> None:
    """Halve zero1's sum."""
    right = Zero1.reduce

    def wrong(self: Zero1, bucket: Bucket, comm: Comm) -> Work:
        bucket.gradients.mul_(0.5)
        return right(self, bucket, comm)

    Zero1.reduce = wrong  # type: ignore[method-assign]


def dropped_weight() -> None:
    """Make a linear's weight gradient zeros."""
    right = Products.write_product

    def wrong(self: Products, a: Tensor, b: Tensor, out: Tensor, beta: int) -> None:
        right(self, a, torch.zeros_like(b), out, beta)

    Products.write_product = wrong  # type: ignore[method-assign]


def wrong_axis() -> None:
    """Sum a bias, whole on every rank, over the replicas and not over the ranks that split the sequence."""
    right = ShardSpec.sum_axes

    def wrong(self: ShardSpec, mesh: Mesh) -> tuple[str, ...]:
        axes = right(self, mesh)
        return axes if self.role.rule.decays else tuple(axis for axis in axes if axis != "tensor")

    ShardSpec.sum_axes = wrong  # type: ignore[method-assign]


def forgotten_vectors() -> None:
    """Step matrices only."""
    right = InPlace._step_together

    def wrong(self: InPlace, members: list[int], *numbers: Any) -> None:
        if self.slots[members[0]].rule.decays:
            right(self, members, *numbers)

    InPlace._step_together = wrong  # type: ignore[method-assign]


def stale_copies() -> None:
    """Keep the half-precision copies unchanged."""
    InPlace.refresh = lambda self: None  # type: ignore[method-assign]


def run_of(**values: Value) -> Config:
    tree = tree_of(PLAIN | values)
    return parse_run(tree | {"check": {"every": 0}})  # the check of replicas alone would see the difference


PLANTS: Sequence[tuple[Plant, str, dict[str, Value]]] = (
    (halved_zero1, "the gradient of", {"data": 2, "sync": "zero1"}),
    (dropped_weight, "the gradient of", {"data": 2, "sync": "allreduce"}),
    (wrong_axis, "bias is off", {"data": 2, "sync": "allreduce", "tensor": "sequence-2"}),
    (forgotten_vectors, "the optimizer's step of", {}),
    (decayed_vectors, "the optimizer's step of", {}),
    (wrong_bias_correction, "the optimizer's step of", {}),
    (wrong_clipping, "the optimizer's step of", {"clip": 0.5}),
    (stale_copies, "is not its master", {}),
)


@pytest.mark.few
@pytest.mark.parametrize("precision", ["O2-bf16", "O2-fp16"])
@pytest.mark.parametrize("plant, told, values", PLANTS, ids=[plant.__name__ for plant, _, _ in PLANTS])
def test_a_mistake_is_seen(plant: Plant, told: str, values: dict[str, Value], precision: str) -> None:
    found = mistakes(run_of(precision=precision, **values), plant)
    assert any(told in line for line in found), found


def own_numbers() -> None:
    """Draw random bits by the number of an element in a rank's part, not in the whole parameter."""

    def own(shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
        return torch.arange(box.num_elements, dtype=torch.int32, device=device)

    rounding.global_index = own  # type: ignore[assignment]


@pytest.mark.parametrize(
    "formats", [{"states": "bf16"}, {"masters": "bf16"}, {"states": "bf16", "masters": "bf16"}], ids=str
)
def test_random_bits_of_a_layout_are_seen(formats: dict[str, str]) -> None:
    tree = tree_of(PLAIN | {"precision": "O2-bf16", "tensor": "megatron-2"})
    tree["optimizer"] |= formats
    config = parse_run(tree)
    assert mistakes(config) == []
    assert any("rounded by the same random bits" in line for line in mistakes(config, own_numbers))


@pytest.mark.parametrize("precision", ["O1-bf16", "O2-bf16", "O2-fp16"])
def test_without_a_mistake_all_holds(precision: str) -> None:
    assert mistakes(run_of(precision=precision, data=2, sync="zero1", tensor="sequence-2", clip=0.5)) == []
