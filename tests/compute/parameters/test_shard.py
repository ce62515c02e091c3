"""Boxes and specs: every element is held once, and the initial value does not depend on the layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compute.parameters import initial
from meshwright.compute.parameters.initial import initialise
from meshwright.compute.parameters.role import NORM
from meshwright.compute.parameters.shard import (
    ONES,
    Box,
    Initial,
    Shard,
    ShardedModule,
    ShardSpec,
    num_parameters,
    seed_generators,
    seed_of,
    shard_specs,
)
from meshwright.ranks.comm import SoloComm
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.ranks.transport import Transport

CPU = torch.device("cpu")
SEED = 1193019385407515193


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor with row-major indices as elements."""
    return torch.arange(math.prod(shape)).view(shape)


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Box:
    sides = [draw(st.tuples(st.integers(0, 5), st.integers(1, 5))) for _ in range(dims)]
    return Box(tuple(offset for offset, _ in sides), tuple(length for _, length in sides))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(1, 4))
    return draw(boxes(dims)), draw(boxes(dims))


@given(pairs())
def test_intersection_holds_what_both_hold(pair: tuple[Box, Box]) -> None:
    one, other = pair
    held = torch.zeros((10,) * len(one.offsets), dtype=torch.int64)
    held[one.slices] += 1
    held[other.slices] += 1
    common = one.intersection(other)
    assert common == other.intersection(one)
    if common is None:
        assert held.max() == 1
    else:
        assert bool((held[common.slices] == 2).all())
        assert common.num_elements == int((held == 2).sum())


@given(pairs())
def test_within_counts_from_the_corner(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    common = outer.intersection(other)
    if common is not None:
        whole = numbered((10,) * len(outer.offsets))
        assert torch.equal(whole[outer.slices][common.within(outer).slices], whole[common.slices])


@given(st.data(), st.integers(1, 4))
def test_flat_parts_are_the_elements_in_order(data: st.DataObject, dims: int) -> None:
    box = data.draw(boxes(dims))
    start = data.draw(st.integers(0, box.num_elements))
    stop = data.draw(st.integers(start, box.num_elements))
    whole = numbered((10,) * dims)
    parts = list(box.flat_parts(start, stop))
    elements = [whole[part.slices].flatten() for part in parts]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *elements]).equal(whole[box.slices].flatten()[start:stop])
    assert len(parts) <= 2 * dims - 1
    assert all(part.num_elements > 0 for part in parts)


@st.composite
def cut_specs(draw: st.DrawFn) -> tuple[Grid, ShardSpec]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    grid = Grid(tuple((f"axis{number}", size) for number, size in enumerate(sizes)))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    placements = {}
    for axis in draw(st.permutations(grid.names)):
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            shape[dim] *= grid.size(axis)
            placements[axis] = Shard(dim)
    return grid, ShardSpec(tuple(shape), placements, Initial(1.0))


@given(cut_specs())
def test_boxes_tile_the_tensor(case: tuple[Grid, ShardSpec]) -> None:
    grid, spec = case
    held = torch.zeros(spec.shape, dtype=torch.int64)
    for rank in range(grid.world_size):
        held[spec.box(grid, rank).slices] += 1
    copies = grid.world_size // grid.size(*spec.axes)
    assert bool((held == copies).all())


def test_gradients_are_summed_over_token_axes_that_do_not_cut() -> None:
    grid = Grid((("data", 2), ("row", 2), ("col", 2)))
    mesh = Mesh(grid, 0, CPU, Transport(), token_axes=("row", "data"))
    assert ShardSpec((4, 4), {"row": Shard(0), "col": Shard(1)}).sum_axes(mesh) == ("data",)
    assert ShardSpec((4,), {"col": Shard(0)}).sum_axes(mesh) == ("data", "row")
    assert ShardSpec((4,)).sum_axes(mesh) == ("data", "row")


class Layer(ShardedModule):
    def __init__(self, mesh: Mesh, spec: ShardSpec) -> None:
        super().__init__(mesh)
        self.declare("weight", spec)
        self.declare("gain", ShardSpec((3,), initial=ONES, role=NORM))


def parameters(mesh: Mesh, spec: ShardSpec, seed: int = 7) -> dict[str, Tensor]:
    model = torch.nn.Sequential(Layer(mesh, spec), Layer(mesh, spec))
    initialise(model, mesh, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@given(cut_specs())
def test_first_values_do_not_depend_on_the_layout(case: tuple[Grid, ShardSpec]) -> None:
    grid, spec = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "BLOCK_ELEMENTS", 5)  # several blocks, also in tensors this small
        whole = parameters(solo_mesh(CPU, grid.names), spec)["1.weight"]
        for rank in range(grid.world_size):
            part = parameters(Mesh(grid, rank, CPU, Transport()), spec)["1.weight"]
            assert torch.equal(part, whole[spec.box(grid, rank).slices])


def test_first_values_follow_name_seed_and_spec() -> None:
    mesh, spec = solo_mesh(CPU), ShardSpec((200, 100), initial=Initial(0.5, mean=2.0))
    values, other = parameters(mesh, spec), parameters(mesh, spec, seed=8)
    assert not torch.equal(values["0.weight"], values["1.weight"])
    assert not torch.equal(values["0.weight"], other["0.weight"])
    assert abs(float(values["0.weight"].mean()) - 2.0) < 0.02
    assert abs(float(values["0.weight"].std()) - 0.5) < 0.02
    assert values["0.gain"].tolist() == [1, 1, 1]


def test_specs_by_full_name() -> None:
    mesh, spec = solo_mesh(CPU), ShardSpec((4, 2))
    model = torch.nn.Sequential(Layer(mesh, spec), Layer(mesh, spec))
    specs = shard_specs(model)
    assert list(specs) == ["0.weight", "0.gain", "1.weight", "1.gain"]
    assert num_parameters(list(specs.values())) == 2 * (8 + 3)
    model.append(torch.nn.Linear(2, 2))
    with pytest.raises(AssertionError, match=r"2\.bias"):
        shard_specs(model)


def test_an_undivisible_cut_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="not divisible over data"):
        ShardSpec((3,), {"data": Shard(0)}).box(Grid((("data", 2),)), 0)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of("1/tokens.weight/0") == SEED
    assert seed_of("1/tokens.weight/1") != SEED
    assert 0 <= seed_of("x") < 2**63


def test_a_solo_mesh_has_a_solo_comm_on_every_axis() -> None:
    comm = solo_mesh(CPU, ("data", "pipe")).comm("pipe", "data")
    assert isinstance(comm, SoloComm)
    assert (comm.axis, comm.size, comm.index) == ("data+pipe", 1, 0)
    assert comm.ledger == Ledger()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_random_numbers_begin_as_torch_begins_them(device: str) -> None:
    drawn = []
    for begin in (torch.manual_seed, lambda seed: seed_generators(seed, torch.device(device))):
        begin(77)
        drawn.append([torch.rand(5, device=where).tolist() for where in ("cpu", device)])
    assert drawn[0] == drawn[1]
