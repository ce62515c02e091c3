"""Buckets: parameters and gradients in few flat runs of memory, so that one collective or one kernel serves many.

A bucket's parameters have the same dtype, are stepped alike and summed over the same axes. They lie in the reverse
order of registration, about the order in which the backward pass finishes their gradients.
A `Slot` is the part of a bucket that this rank's optimizer steps: all of it, a slice (ZeRO-1), or nothing (a worker
of a parameter server). A `Place` says which part of which parameter lies where in a slot; checkpoints are written
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.parameters.shard import Box, ShardSpec
from meshwright.ranks.grid import ENDS, HEAD_COPIES, PIPE, REPLICATE, Grid
from meshwright.ranks.mesh import Mesh

PartsUsing = Mapping[str, tuple[int, ...]]
"""The parts of a chain (Chunk.parts), or the chunks of a stage, that use each parameter, by its name."""


@dataclass(frozen=True)
class Place:
    """Elements start..stop of a flat tensor are the `box` of the parameter `name` of global `shape`, row by row.

    `is_hidden`: all of a hidden layer's matrix.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    is_hidden: bool = False

    def clip(self, start: int, stop: int) -> Iterator[Place]:
        """The boxes of this place that lie in start..stop, counted from start."""
        position = max(start, self.start)
        # A slice of flat memory may begin and end inside of a row: boxes are what checkpoints of any layout can read.
        for box in self.box.flat_parts(position - self.start, min(stop, self.stop) - self.start):
            stops = position - start + box.num_elements
            # A piece of a matrix is no matrix: Muon must not make it orthogonal by itself.
            yield Place(self.name, self.shape, box, position - start, stops, self.is_hidden and box == self.box)
            position += box.num_elements


@dataclass(frozen=True)
class Slices:
    """Flat memory of `places` that ranks along `axes` hold in slices of `length`, in their order; the last may be
    shorter. Without axes a rank holds all of it."""

    places: tuple[Place, ...] = ()
    axes: tuple[str, ...] = ()
    length: int = 0


StepWeights = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], bool], None]
"""step(weights, gradients, states, matrices): an optimizer's update of weights, in place. `states`: a list by name,
each like `weights`; `matrices`: whether these are, for no others decay."""


@dataclass(frozen=True)
class Slot:
    """Flat memory that this rank's optimizer steps: `parameter` [n], its .grad [n], and what they hold.

    `slices`: the flat memory that ranks share, of which this slot is their part. `part_axes`: the axes whose ranks hold
    different parts, so that a norm is summed over them. (So do the stages of a pipeline, whatever the slot.) `shared`:
    the stand-ins for parts of an axis whose ranks share the parameters: ENDS of a tied table, HEAD_COPIES of key-value
    heads.
    """

    parameter: nn.Parameter
    places: tuple[Place, ...]
    matrix: bool
    part_axes: tuple[str, ...]
    shared: tuple[str, ...] = ()
    slices: Slices = Slices()
    nudged: bool = False
    """Whether a step moves each element by the sign of its gradient (ShardSpec.nudged)."""

    def copy_axes(self, grid: Grid) -> tuple[str, ...]:
        """The axes whose ranks hold the same part."""
        return other_axes(grid, self.part_axes, self.shared)


@dataclass(frozen=True)
class Bucket:
    """`values` [n]: the parameters are views of it. `gradients` [n] likewise, perhaps of a wider type (gradient_dtype).

    n is padded to the sum axes' size. `parts`: those of the model that use its parameters, where a bucket is a part's.
    `chunks`: those of the stage that use them, where it has several and sums slices of gradients.
    """

    values: Tensor
    gradients: Tensor
    parameters: tuple[nn.Parameter, ...]
    places: tuple[Place, ...]
    matrix: bool
    sum_axes: tuple[str, ...]
    cut_axes: tuple[str, ...]
    parts: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    nudged: bool = False

    def members(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of `gradients`, in the parameter's shape."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            yield parameter, self.gradients[place.start : place.stop].view(parameter.shape)

    def slot(self, start: int, stop: int, *, part_axes: tuple[str, ...]) -> Slot:
        """The part start..stop as something to step. `part_axes`: the sum axes whose ranks step other parts, each as
        long as this one, in order; none where they all step the same."""
        parameter = nn.Parameter(self.values[start:stop])
        gradient = floats_in(self.gradients[start:stop])
        # torch refuses a .grad of another dtype than the parameter's unless grad_dtype says so.
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        places = tuple(part for place in self.places for part in place.clip(start, stop))
        slices = Slices(self.places, part_axes, stop - start)
        return Slot(parameter, places, self.matrix, (*self.cut_axes, *part_axes), self.shared, slices, self.nudged)

    @property
    def shared(self) -> tuple[str, ...]:
        """The stand-ins for parts of an axis whose ranks share the parameters."""
        return tuple(axis for axis in self.sum_axes if axis in (HEAD_COPIES, ENDS))

    def copy_axes(self, grid: Grid) -> tuple[str, ...]:
        """The axes whose ranks hold the same parameters."""
        return other_axes(grid, self.cut_axes, self.shared)


def floats_in(gradients: Tensor) -> Tensor:
    """The memory [n] in which a slot finds its gradient: float32 in the first half where sums are int64."""
    # An arrived sum of integers becomes float32 in its own bytes: n int64 have room for 2n float32.
    return gradients.view(torch.float32)[: gradients.numel()] if gradients.dtype == torch.int64 else gradients


def slice_axes(sum_axes: Iterable[str]) -> tuple[str, ...]:
    """The sum axes of a bucket over which gradients that are kept as slices are sliced. Ranks along the others hold the
    same slice: the ends of a pipeline do not come to a tied table at the same time, and shard groups are copies."""
    return tuple(axis for axis in sum_axes if axis not in (ENDS, REPLICATE))


def group_axes(sum_axes: Iterable[str]) -> tuple[str, ...]:
    """The sum axes of a bucket but that of the shard groups, each of which steps all of it (zero1)."""
    return tuple(axis for axis in sum_axes if axis != REPLICATE)


def other_axes(grid: Grid, axes: Collection[str], shared: Iterable[str]) -> tuple[str, ...]:
    """All axes but the given ones and the stages, which hold different parameters; and the stand-ins of what is
    shared."""
    # ENDS and HEAD_COPIES are no axes of the grid: they stand for the part of one whose ranks hold the same.
    return tuple(axis for axis in (*grid.names, *shared) if axis != PIPE and axis not in axes)


Fill = Callable[[str, Tensor], nn.Parameter]
"""fill(name, out): the model's parameter, whose initial values have been written into out."""


@dataclass(frozen=True)
class FlatWeights:
    """Weights as a rank computes with them: `values` [n], what lies where in them, and whose ranks hold the same."""

    values: Tensor
    places: tuple[Place, ...]
    copy_axes: tuple[str, ...]


@dataclass(frozen=True)
class BucketKey:
    """Parameters with equal keys share a bucket: they are summed over the same axes and stored alike. `parts`: those of
    the model that use them, where each part is gathered by itself. `chunks`: those of the stage, where each fills its
    own buckets."""

    dtype: torch.dtype
    matrix: bool
    sum_axes: tuple[str, ...]
    cut_axes: tuple[str, ...]
    parts: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    nudged: bool = False

    def ranks(self, mesh: Mesh) -> int:
        """The number of ranks that sum such a bucket together."""
        return len(mesh.grid.group(mesh.rank, *self.sum_axes))


def arranged(
    parameters: Iterable[tuple[str, int, torch.dtype]],
    specs: dict[str, ShardSpec],
    mesh: Mesh,
    bucket_bytes: int,
    parts: PartsUsing | None = None,
    chunks: PartsUsing | None = None,
) -> list[tuple[BucketKey, list[str]]]:
    """Which parameters (name, elements on this rank, dtype) share a bucket of about `bucket_bytes`, in order of
    readiness: the reverse of the given order. `parts`: a bucket is instead what the same parts of the model use.
    `chunks`: only what the same chunks of the stage use shares a bucket."""
    axes: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # layers have specs in common
    open_groups: dict[BucketKey, list[str]] = {}
    sizes: dict[BucketKey, int] = {}
    full: list[tuple[BucketKey, list[str]]] = []
    # Backward passes finish gradients in about the reverse order of registration, so the first bucket to be full is the
    # first to leave.
    for name, num_elements, dtype in reversed(list(parameters)):
        spec = specs[name]
        users = parts[name] if parts is not None else ()
        own = chunks[name] if chunks is not None else ()
        # A spec's axes cost a walk over the grid: asked once a spec object, which layers of the same shape share.
        if id(spec) not in axes:
            axes[id(spec)] = spec.sum_axes(mesh), mesh.grid.ordered(spec.axes)
        kind = BucketKey(dtype, spec.matrix, *axes[id(spec)], users, own, spec.nudged)
        open_groups.setdefault(kind, []).append(name)
        sizes[kind] = sizes.get(kind, 0) + num_elements * dtype.itemsize
        # A part's bucket takes all of the part, however large: its weights are gathered and given back at once.
        if sizes[kind] >= bucket_bytes and parts is None:
            full.append((kind, open_groups.pop(kind)))
            del sizes[kind]
    # The last part goes backward first. sorted is stable: without parts the order of readiness stays.
    return sorted([*full, *open_groups.items()], key=lambda group: -min(group[0].parts, default=0))


VECTOR = 16
"""Elements that a CPU's vectors are multiples of: an optimizer's kernel rounds what is left over in another way."""


def padded(num_elements: int, ranks: int, *, exact: bool = False) -> int:
    """The length of a bucket of so many elements, with padding: the ranks that sum it have equal parts, where bits are
    layout-free of whole vectors."""
    # Equal parts let reduce-scatter and all-gather take the bucket as it lies, without a table of lengths.
    unit = ranks * (VECTOR if exact else 1)
    return -(-num_elements // unit) * unit


def make_buckets(
    parameters: Iterable[tuple[str, nn.Parameter]],
    specs: dict[str, ShardSpec],
    mesh: Mesh,
    bucket_bytes: int,
    parts: PartsUsing | None = None,
    chunks: PartsUsing | None = None,
    *,
    widens: bool = False,
    exact: bool = False,
    shares: bool = False,
    fill: Fill | None = None,
) -> Iterator[Bucket]:
    """Move the parameters into buckets of about `bucket_bytes`, or by `parts` and `chunks`, in order of readiness.
    `widens`: as gradient_dtype. `exact`: gradients are sums of integers (bits/). `shares`: gradients lie where all
    ranks that sum them can read them, if they share a node. `fill`: gives meta tensors (Mesh.empty) their values.

    A bucket is made when it is asked for, so that whoever keeps a slice of each never holds all of them.
    """
    members = dict(parameters)
    sizes = [(name, parameter.numel(), parameter.dtype) for name, parameter in members.items()]
    for kind, names in arranged(sizes, specs, mesh, bucket_bytes, parts, chunks):
        group, dtype = [(name, members[name]) for name in names], gradient_dtype(kind.dtype, widens)
        # Integers have one sum whatever the order and the layout (bits/fixed.py).
        dtype = torch.int64 if exact else dtype
        length = padded(sum(parameter.numel() for _, parameter in group), kind.ranks(mesh), exact=exact)
        # A group's zeros may lie in a window that its ranks of one node read: a copy into it would cost what it saves.
        comm = mesh.comm(*(kind.sum_axes if shares else ()))
        yield _make_bucket(kind, group, specs, mesh, comm.zeros(length, dtype, mesh.device), fill)


def gradient_views(buckets: Iterable[Bucket]) -> dict[nn.Parameter, Tensor]:
    """Each parameter's part of its bucket's gradients, in the parameter's shape."""
    return {parameter: view for bucket in buckets for parameter, view in bucket.members()}


def gradient_dtype(stored: torch.dtype, widens: bool) -> torch.dtype:
    """The dtype in which gradients of parameters that are `stored` so are held; `widens`: float32 or better.

    In half precision a sum of equal terms stops growing: bf16's after 256 of them, where a term is less than its last
    bit.
    """
    return torch.promote_types(stored, torch.float32) if widens else stored


def _make_bucket(
    kind: BucketKey,
    group: list[tuple[str, nn.Parameter]],
    specs: dict[str, ShardSpec],
    mesh: Mesh,
    gradients: Tensor,
    fill: Fill | None,
) -> Bucket:
    values = torch.zeros_like(gradients, dtype=kind.dtype)
    places, members, start = [], [], 0
    for name, declared in group:
        stop = start + declared.numel()
        view = values[start:stop].view(declared.shape)
        # Values are drawn straight into the bucket, so that no rank ever holds a model beside its buckets.
        if fill is not None and declared.is_meta:
            parameter = fill(name, view)
        else:
            parameter = declared
            view.copy_(parameter.detach())
            # The parameter object stays, so that layers and hooks which know it keep knowing it.
            parameter.data = view
        members.append(parameter)
        parameter.grad_dtype = floats_in(gradients[:0]).dtype
        spec, box = specs[name], specs[name].box(mesh.grid, mesh.rank)
        # Muon steps whole matrices of hidden layers alone; tables and heads are AdamW's (optim/muon.py).
        is_hidden = spec.matrix and not spec.table and box.lengths == spec.shape
        places.append(Place(name, spec.shape, box, start, stop, is_hidden))
        start = stop
    axes = kind.sum_axes, kind.cut_axes
    return Bucket(
        values, gradients, tuple(members), tuple(places), kind.matrix, *axes, kind.parts, kind.chunks, kind.nudged
    )
