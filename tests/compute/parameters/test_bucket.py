"""Buckets are views of flat memory, grouped by kind, padded to the ranks; places give each parameter's range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.compute.parameters.bucket import Bucket, Place, make_buckets
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.role import NORM
from meshwright.compute.parameters.shard import Box, Initial, Shard, ShardedModule, ShardSpec, shard_specs
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.transport import Transport

GRID = Grid((("data", 3), ("col", 2)))
HUGE = 2**30


class Model(ShardedModule):
    """Three matrices, one cut, and a norm's vector."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.declare("first", ShardSpec((5, 4), initial=Initial(1.0)))
        self.declare("cut", ShardSpec((3, 4), {"col": Shard(1)}, initial=Initial(1.0)))
        self.declare("gain", ShardSpec((7,), role=NORM, initial=Initial(1.0)))
        self.declare("last", ShardSpec((2, 4), initial=Initial(1.0)))


def mesh_of(rank: int) -> Mesh:
    return Mesh(GRID, rank, torch.device("cpu"), Transport())


def buckets_of(
    rank: int, bucket_bytes: int, half: tuple[str, ...] = ()
) -> tuple[Model, list[Bucket], dict[str, torch.Tensor]]:
    mesh = mesh_of(rank)
    model = Model(mesh)
    initialise(model, mesh, 1)
    for name in half:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return model, list(make_buckets(model.named_parameters(), shard_specs(model), mesh, bucket_bytes)), before


def names(bucket: Bucket) -> list[str]:
    return [place.name for place in bucket.places]


def test_groups_by_kind_in_order_of_readiness() -> None:
    _, buckets, _ = buckets_of(0, HUGE)
    assert [names(bucket) for bucket in buckets] == [["last", "first"], ["gain"], ["cut"]]
    assert [bucket.rule.decays for bucket in buckets] == [True, False, True]
    assert [bucket.sum_axes for bucket in buckets] == [("data",)] * 3
    assert [bucket.cut_axes for bucket in buckets] == [(), (), ("col",)]


def test_dtypes_do_not_mix() -> None:
    _, buckets, _ = buckets_of(0, HUGE, half=("first",))
    assert [names(bucket) for bucket in buckets] == [["last"], ["gain"], ["cut"], ["first"]]
    assert buckets[3].values.dtype == buckets[3].gradients.dtype == torch.bfloat16


def test_a_bucket_is_closed_when_full() -> None:
    _, buckets, _ = buckets_of(0, 8 * 4)  # `last` has 8 elements of 4 bytes
    assert [names(bucket) for bucket in buckets] == [["last"], ["first"], ["gain"], ["cut"]]


@pytest.mark.parametrize("rank", range(GRID.world_size))
def test_padded_to_the_ranks_that_sum_it(rank: int) -> None:
    _, buckets, _ = buckets_of(rank, HUGE)
    assert [bucket.values.numel() for bucket in buckets] == [30, 9, 6]  # 28, 7, 6 elements; 3 ranks
    assert [bucket.gradients.numel() for bucket in buckets] == [30, 9, 6]
    assert buckets[0].values[28:].tolist() == [0, 0]


@pytest.mark.parametrize("rank", range(GRID.world_size))
def test_parameters_are_views_and_gradients_have_their_place(rank: int) -> None:
    model, buckets, before = buckets_of(rank, HUGE)
    for bucket in buckets:
        for place, (parameter, gradient) in zip(bucket.places, bucket.views.items(), strict=True):
            assert parameter is model.get_parameter(place.name)
            assert torch.equal(parameter, before[place.name])
            assert place.box == shard_specs(model)[place.name].box(GRID, rank)
            assert parameter.data_ptr() == bucket.values[place.start :].data_ptr()
            assert place.stop - place.start == parameter.numel()
            bucket.gradients[place.start] = 3
            assert gradient.shape == parameter.shape
            assert gradient.flatten()[0] == 3
            assert gradient.count_nonzero() == 1


def test_slots_share_memory_and_say_what_they_hold() -> None:
    _, buckets, before = buckets_of(1, HUGE)
    slot = buckets[0].slot(10, 20, part_axes=("data",))
    assert slot.part_axes == ("data",)
    assert buckets[0].slot(0, 30, part_axes=()).part_axes == ()
    assert buckets[2].slot(0, 6, part_axes=()).part_axes == ("col",)
    assert buckets[2].slot(0, 2, part_axes=buckets[2].sum_axes).part_axes == ("col", "data")
    assert buckets[0].slot(0, 0, part_axes=("data",)).places == ()
    assert {place.name for place in slot.places} == {"first"}
    for place in slot.places:
        assert torch.equal(slot.parameter[place.start : place.stop], before["first"][place.box.slices].flatten())
    slot.parameter.data.fill_(5)
    assert slot.parameter.grad is not None
    slot.parameter.grad.fill_(6)
    assert buckets[0].values[10:20].unique().tolist() == [5]
    assert buckets[0].gradients[10:20].unique().tolist() == [6]


@given(st.data())
def test_clipped_places_hold_the_same_elements(data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    first = data.draw(st.integers(0, 5))
    box = Box(tuple(2 for _ in lengths), lengths)
    place = Place("p", tuple(9 for _ in lengths), box, first, first + box.num_elements)
    start = data.draw(st.integers(0, 80))
    stop = data.draw(st.integers(start, 80))
    whole = torch.arange(9 ** len(lengths)).view(place.shape)
    flat = torch.full((80,), -1)
    flat[place.start : place.stop] = whole[box.slices].flatten()
    seen = torch.full((stop - start,), -1)
    for part in place.clip(start, stop):
        assert (part.name, part.shape) == (place.name, place.shape)
        seen[part.start : part.stop] = whole[part.box.slices].flatten()
    assert torch.equal(seen, flat[start:stop])


def test_a_parameter_keeps_its_identity() -> None:
    model, buckets, _ = buckets_of(0, HUGE)
    assert {id(parameter) for bucket in buckets for parameter in bucket.views} == set(map(id, model.parameters()))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
