"""Buckets: many parameters and their gradients in flat memory, so that one collective or kernel serves all of them.

A bucket's parameters have one dtype, one optimizer rule and one set of axes to sum over. Parameters are stored in the
reverse order of registration, about the order of finished gradients in a backward pass.
A `Slot` is the part of a bucket that this rank's optimizer steps: the whole, a slice (ZeRO-1), nothing (a worker of a
parameter server), or the matrices that the rank owns (Muon under ZeRO-1, since a slice would cut them). A `Place` is
the position of a part of a parameter in a slot; checkpoints are written by place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.fixed import floats_in
from meshwright.compute.parameters.owners import DealtOver, Segments, dealt
from meshwright.compute.parameters.role import Role, RuleOf, StepRule
from meshwright.compute.parameters.shard import Box, ShardSpec
from meshwright.ranks.grid import ENDS, HEAD_COPIES, PIPE
from meshwright.ranks.mesh import Mesh

PartsUsing = Mapping[str, tuple[int, ...]]
"""By parameter name, the numbers of the chain's parts (Chunk.parts), or of the stage's chunks, that use it."""


@dataclass(frozen=True)
class Place:
    """Elements start..stop of flat memory hold the `box` of parameter `name` (global `shape`) in row-major order."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int

    def clip(self, start: int, stop: int) -> Iterator[Place]:
        """Yield places of this place's elements in start..stop, with positions relative to start."""
        position = max(start, self.start)
        # A slice of flat memory may begin and end inside of a row; checkpoints of any layout can read its boxes.
        for box in self.box.flat_parts(position - self.start, min(stop, self.stop) - self.start):
            stops = position - start + box.num_elements
            yield Place(self.name, self.shape, box, position - start, stops)
            position += box.num_elements


@dataclass(frozen=True)
class Slices:
    """Flat memory of `places` cut into slices of `length`, one for each rank along `axes` in order; the last may be
    shorter. Without axes every rank holds all of it."""

    places: tuple[Place, ...] = ()
    axes: tuple[str, ...] = ()
    length: int = 0


StepWeights = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], StepRule], None]
"""step(weights, gradients, states, rule): updates weights in place. `states`: a list of tensors for each moment."""


class SlotSize(NamedTuple):
    """Size of a slot, which gives the sizes of optimizer states. `matrices`: the shape of each stepped matrix."""

    elements: int
    dtype: torch.dtype
    rule: StepRule
    matrices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Slot:
    """Flat memory that this rank's optimizer steps: `parameter` [n], `parameter.grad` [n], and the places of both.

    `slices`: the flat memory that contains this slot, cut by rank. `part_axes`: axes with different parts on each rank;
    a norm is summed over these axes and the pipeline's stages. `shared`: names of groups inside of an axis with equal
    parameters on each rank: ENDS (a tied table), HEAD_COPIES (key-value heads).
    """

    parameter: nn.Parameter
    places: tuple[Place, ...]
    rule: StepRule
    part_axes: tuple[str, ...]
    shared: tuple[str, ...] = ()
    slices: Slices = Slices()
    copy_axes: tuple[str, ...] = ()
    """Axes, and groups inside of an axis (`shared`), with the same part on each rank."""

    @property
    def size(self) -> SlotSize:
        matrices = tuple(region.shape for region in self.places) if self.rule.by == "matrices" else ()
        return SlotSize(self.parameter.numel(), self.parameter.dtype, self.rule, matrices)

    def state_slices(self, shape_of: Callable[[tuple[int, ...]], tuple[int, ...]] | None) -> Slices:
        """Return the memory of a state, with shape_of(shape of each matrix); None: the memory of the weights."""
        if shape_of is None:
            return self.slices
        places, start = [], 0
        for region in self.places:
            whole = Box((0,) * len(shape := shape_of(region.shape)), shape)
            places.append(Place(region.name, shape, whole, start, start + whole.num_elements))
            start = places[-1].stop
        return Slices(tuple(places))


@dataclass(frozen=True)
class Bucket:
    """Flat memory of parameters: `values` [n] and `gradients` [n], perhaps wider (gradient_dtype), or int64 [n, 2].

    Parameters are views of `values`; `views` holds each parameter's view of `gradients`. n is padded to a multiple of
    the number of ranks that sum the bucket. `parts`: indices of the model's parts that use the bucket, if weights are
    gathered by part. `chunks`: indices of the stage's chunks that use the bucket, if slices are summed by chunk.
    """

    values: Tensor
    gradients: Tensor
    views: Mapping[nn.Parameter, Tensor]
    places: tuple[Place, ...]
    rule: StepRule
    sum_axes: tuple[str, ...]
    cut_axes: tuple[str, ...]
    parts: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()
    """Names of groups with the same parameters on each rank, as in Slot.shared."""
    copy_axes: tuple[str, ...] = ()
    """Axes, and the `shared` groups, with the same parameters on each rank."""
    segments: Segments = ()
    """The first element of each rank's matrices, and the end of the last rank's (BucketKey)."""

    def slot(self, start: int, stop: int, *, part_axes: tuple[str, ...]) -> Slot:
        """Make the slot of elements start..stop. `part_axes`: sum axes with ranks that step the other parts, of equal
        length and in order; empty if all ranks step the same part."""
        parameter = nn.Parameter(self.values[start:stop], requires_grad=self.rule.trained)
        if self.rule.trained:
            gradient = floats_in(self.gradients[start:stop])
            # torch refuses a .grad of another dtype unless grad_dtype is set.
            parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient
        places = tuple(clipped for region in self.places for clipped in region.clip(start, stop))
        # Whole matrices have one owner, and their memory is no slice of the other ranks'.
        slices = Slices(places) if self.segments else Slices(self.places, part_axes, stop - start)
        copies = tuple(axis for axis in self.copy_axes if axis not in part_axes)
        axes = (*self.cut_axes, *part_axes)
        return Slot(parameter, places, self.rule, axes, self.shared, slices, copies)


Fill = Callable[[str, Tensor], nn.Parameter]
"""fill(name, out): writes a parameter's initial values into `out`, and returns the model's parameter."""


@dataclass(frozen=True)
class FlatWeights:
    """Weights that a rank computes with: `values` [n], places, and the axes with equal values on each rank."""

    values: Tensor
    places: tuple[Place, ...]
    copy_axes: tuple[str, ...]


@dataclass(frozen=True)
class BucketKey:
    """Key of a bucket: parameters with equal keys share one. `parts`, `chunks`: as in Bucket.

    `segments`: for matrices distributed over ranks, the first element of each rank's matrices and the end of the last.
    """

    dtype: torch.dtype
    rule: StepRule
    sum_axes: tuple[str, ...]
    cut_axes: tuple[str, ...]
    parts: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    segments: Segments = ()


def arranged(
    parameters: Iterable[tuple[str, int, torch.dtype]],
    specs: dict[str, ShardSpec],
    mesh: Mesh,
    bucket_bytes: int,
    parts: PartsUsing | None = None,
    chunks: PartsUsing | None = None,
    rule_of: RuleOf = Role.by_elements,
    dealt_over: DealtOver | None = None,
) -> list[tuple[BucketKey, list[str]]]:
    """Assign parameters (name, elements on this rank, dtype) to buckets of about `bucket_bytes`, in reverse order.
    `parts`: one bucket for each set of parts instead, of any size. `chunks`: parameters of different chunks of the
    stage share no bucket. `dealt_over`: number of ranks that split a bucket's matrices; None: each rank steps all."""
    axes: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # layers have specs in common
    open_groups: dict[BucketKey, list[str]] = {}
    sizes: dict[BucketKey, int] = {}
    elements: dict[str, int] = {}
    full: list[tuple[BucketKey, list[str]]] = []
    # Backward passes finish gradients in about the reverse order of registration, so the first full bucket is reduced
    # first.
    for name, num_elements, dtype in reversed(list(parameters)):
        spec = specs[name]
        users = parts[name] if parts is not None else ()
        chunk_users = chunks[name] if chunks is not None else ()
        # Computed once per spec object, shared by layers of one shape: the axes cost a walk over the grid.
        if id(spec) not in axes:
            axes[id(spec)] = spec.sum_axes(mesh), mesh.grid.ordered(spec.axes)
        key = BucketKey(dtype, rule_of(spec.role), *axes[id(spec)], users, chunk_users)
        elements[name] = num_elements
        open_groups.setdefault(key, []).append(name)
        sizes[key] = sizes.get(key, 0) + num_elements * dtype.itemsize
        # A part's weights are gathered and freed together, so they are one bucket of any size.
        if sizes[key] >= bucket_bytes and parts is None:
            full.append((key, open_groups.pop(key)))
            del sizes[key]
    # The last part's backward pass is first. Without parts the stable sort keeps the order.
    groups = sorted([*full, *open_groups.items()], key=lambda group: -min(group[0].parts, default=0))
    return groups if dealt_over is None else dealt(groups, elements, dealt_over)


VECTOR = 16
"""Elements of a CPU kernel's vector loop; kernels round the remainder of a buffer differently."""


def padded(num_elements: int, ranks: int, *, exact: bool = False) -> int:
    """Pad a bucket's length to `ranks` equal parts; to parts of whole vectors if `exact` (bits: layout-free)."""
    # Equal parts let reduce-scatter and all-gather take the bucket without a table of lengths.
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
    rule_of: RuleOf = Role.by_elements,
    dealt_over: DealtOver | None = None,
    widens: bool = False,
    exact: bool = False,
    shares: bool = False,
    fill: Fill | None = None,
) -> Iterator[Bucket]:
    """Move parameters into buckets of about `bucket_bytes`, or by `parts` and `chunks`, in order of readiness.

    `rule_of`: the optimizer's. `dealt_over`: as in `arranged`. `widens`: as in gradient_dtype. `exact`: gradients are
    sums of integers (bits/). `shares`: gradients use memory that a node's ranks share. `fill`: writes the
    initial values of meta parameters (Mesh.empty). Lazy, so that a caller that keeps a slice of each bucket never holds
    all buckets.
    """
    members = dict(parameters)
    sizes = [(name, parameter.numel(), parameter.dtype) for name, parameter in members.items()]
    for key, names in arranged(sizes, specs, mesh, bucket_bytes, parts, chunks, rule_of, dealt_over):
        group, dtype = [(name, members[name]) for name in names], gradient_dtype(key.dtype, widens)
        # Sums of integers do not depend on order and layout (parameters/fixed.py).
        dtype = torch.int64 if exact else dtype
        length = padded(
            sum(parameter.numel() for _, parameter in group),
            len(mesh.grid.group(mesh.rank, *key.sum_axes)),
            exact=exact,
        )
        # Allocated in the window that ranks of a node share: a copy into the window would cancel the saving.
        comm = mesh.comm(*(key.sum_axes if shares else ()))
        # Frozen parameters have no gradients and no gradient memory.
        trained = key.rule.trained
        words = 2 if exact and key.dtype == torch.float64 else 1
        gradients = comm.zeros(length * words, dtype, mesh.device) if trained else torch.empty(0, device=mesh.device)
        if trained and words == 2:
            gradients = gradients.view(length, words)
        yield _make_bucket(key, group, specs, mesh, length, gradients, fill)


def gradient_dtype(stored: torch.dtype, widens: bool) -> torch.dtype:
    """Return the gradient dtype of parameters of dtype `stored`; at least float32 if `widens`.

    A bf16 sum of equal terms stops growing after 256 terms, when a term is below the sum's last bit.
    """
    return torch.promote_types(stored, torch.float32) if widens else stored


def _make_bucket(
    key: BucketKey,
    group: list[tuple[str, nn.Parameter]],
    specs: dict[str, ShardSpec],
    mesh: Mesh,
    length: int,
    gradients: Tensor,
    fill: Fill | None,
) -> Bucket:
    values = torch.zeros(length, dtype=key.dtype, device=gradients.device)
    places, views, start = [], {}, 0
    for name, declared in group:
        stop = start + declared.numel()
        view = values[start:stop].view(declared.shape)
        # Draw values directly into the bucket, so that no rank holds a second copy of the model.
        if fill is not None and declared.is_meta:
            parameter = fill(name, view)
        else:
            parameter = declared
            view.copy_(parameter.detach())
            # Keep the parameter object: layers and hooks refer to it.
            parameter.data = view
        if key.rule.trained:
            views[parameter] = gradients[start:stop].view(*declared.shape, *gradients.shape[1:])
            parameter.grad_dtype = floats_in(gradients[:0]).dtype
        spec, box = specs[name], specs[name].box(mesh.grid, mesh.rank)
        assert key.rule.by != "matrices" or box.lengths == spec.shape, f"{name} is stepped whole, and cut into {box}"
        places.append(Place(name, spec.shape, box, start, stop))
        start = stop
    axes = key.sum_axes, key.cut_axes
    # Groups inside of an axis with equal parameters, not axes of the grid. Stages hold different parameters.
    shared = tuple(axis for axis in key.sum_axes if axis in (HEAD_COPIES, ENDS))
    copies = tuple(axis for axis in (*mesh.grid.names, *shared) if axis != PIPE and axis not in key.cut_axes)
    return Bucket(
        values,
        gradients,
        views,
        tuple(places),
        key.rule,
        *axes,
        key.parts,
        key.chunks,
        shared,
        copies,
        key.segments,
    )
