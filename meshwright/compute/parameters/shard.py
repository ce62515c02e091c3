"""How a parameter is sharded over ranks: ShardSpec, Box, and the base class of layers that declare parameters.

The spec decides the axes over which a gradient is summed: exactly the axes with different inputs on each rank that do
not shard the parameter. These are the axes that split tokens and, for a norm of heads, the axes that split heads. The
same spec gives initial values, the gradient norm, the parameter count and checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.gradients import Gradients, WriteGradient
from meshwright.compute.parameters.role import BIAS, FROZEN, HIDDEN_MATRIX, Role
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import ENDS, HEAD_COPIES, Grid

if TYPE_CHECKING:
    from meshwright.ranks.mesh import Mesh


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor: `offsets` and `lengths`, one of each per dim."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that index this box in the global tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.lengths, strict=True))

    def intersection(self, box: Box) -> Box | None:
        """Return the box of the elements in both boxes, or None."""
        starts = tuple(map(max, self.offsets, box.offsets))
        stops = (min(a.stop, b.stop) for a, b in zip(self.slices, box.slices, strict=True))
        lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, lengths) if all(length > 0 for length in lengths) else None

    def within(self, outer: Box) -> Box:
        """Return this box with offsets relative to the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def flat_parts(self, start: int, stop: int) -> Iterator[Box]:
        """Yield elements start..stop of this box (row-major order) as at most 2·dims - 1 boxes, in order: a part of a
        row, whole rows, a part of a row."""
        if start >= stop:
            return
        row = Box(self.offsets[1:], self.lengths[1:])
        size = row.num_elements
        # first: the first row that begins in start..stop. last: the row that contains stop; it is the row before
        # `first` if start..stop begins and ends inside one row.
        first, last = -(-start // size), stop // size
        begin = (first - 1) * size
        rows = [
            (first - 1, 1, row.flat_parts(start - begin, min(stop - begin, size))),
            (first, last - first, (row,) if first < last else ()),
            (last, 1, row.flat_parts(0, stop - last * size) if first <= last else ()),
        ]
        for index, count, parts in rows:
            for inner in parts:
                yield Box((self.offsets[0] + index, *inner.offsets), (count, *inner.lengths))


@dataclass(frozen=True)
class Initial:
    """Initial values of a parameter: normal with `std` around `mean`; std 0 is a constant. `uniform`: uniform in
    mean ± std instead."""

    std: float
    mean: float = 0.0
    uniform: bool = False

    def draw(self, out: Tensor, generator: torch.Generator) -> Tensor:
        """Fill a tensor with values of this distribution, and return the tensor."""
        if self.uniform:
            return out.uniform_(self.mean - self.std, self.mean + self.std, generator=generator)
        return out.normal_(self.mean, self.std, generator=generator)


ZEROS = Initial(0.0)
ONES = Initial(0.0, 1.0)


@dataclass(frozen=True)
class Shard:
    """Even sharding of a parameter along `dim` over one mesh axis, in rank order. `copies`: number of neighbouring
    ranks with the same shard; each computes with different inputs."""

    dim: int
    copies: int = 1


Placements = Mapping[str, Shard]
"""A parameter's shards by mesh axis. Ranks of an axis that is not a key hold copies, or one owner holds the whole."""


UNPLACED: Placements = {}


@dataclass(frozen=True)
class ShardSpec:
    """Placement of a parameter of global `shape`: the dim that each mesh axis shards, as in DTensor: {"row": Shard(0)}.

    `role`: the purpose of the parameter. `tied`: the first and the last pipeline stage each hold a copy, and both
    gradients are summed. `owner`: (axis, index) of the rank that holds the whole parameter; the axis's other ranks hold
    no row. `initial` None: keep the values from construction, equal on every rank. `partial_over`: axes that split no
    tokens but still have different inputs on each rank, e.g. the heads of a shared norm.
    """

    shape: tuple[int, ...]
    placements: Placements = field(default_factory=dict)
    initial: Initial | None = ZEROS
    role: Role = HIDDEN_MATRIX
    tied: bool = False
    owner: tuple[str, int] | None = None
    partial_over: tuple[str, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        """Axes with different parts of this parameter on each rank."""
        return frozenset([*self.placements, *([self.owner[0]] if self.owner else [])])

    def box(self, grid: Grid, rank: int) -> Box:
        """Return the rank's part of the parameter. The config's rules ensure that sharded dims are divisible."""
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        for axis, shard in self.placements.items():
            parts = grid.size(axis) // shard.copies
            assert lengths[shard.dim] % parts == 0, f"{self} is not divisible over {axis} of {grid}"
            # Two axes may shard one dim: the later axis splits the earlier axis's shard, so offsets add up.
            lengths[shard.dim] //= parts
            offsets[shard.dim] += lengths[shard.dim] * (grid.index(rank, axis) // shard.copies)
        if self.owner is not None and grid.index(rank, self.owner[0]) != self.owner[1]:
            # Declare the parameter with no rows: names, buckets and collectives are then equal on the axis's ranks.
            lengths[0] = 0
        return Box(tuple(offsets), tuple(lengths))

    def sum_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes to sum this parameter's gradient over: different tokens or heads per rank, and not sharded.

        A tied parameter adds the pipeline's ends, which both use it. Key-value heads add the ranks with copies.
        """
        # Both ends use a tied table, and each computes only a part of the gradient.
        ends = (ENDS,) if self.tied else ()
        copies = (HEAD_COPIES,) if any(shard.copies > 1 for shard in self.placements.values()) else ()
        # A rank with other tokens, or other heads of one norm, has another addend. A rank with another shard has
        # another parameter. There is no third case.
        feeding = dict.fromkeys((*mesh.token_axes, *self.partial_over))
        # In the grid's order: equal sets of axes are then one group, one bucket and one comm.
        return mesh.grid.ordered([*(axis for axis in feeding if axis not in self.axes), *copies, *ends])


class ShardedModule(nn.Module):
    """Layer that declares each parameter with a spec. Spec and mesh give the part that this rank holds."""

    in_graphs: ClassVar[bool] = False
    """Whether a compiler may trace `forward` (tensor/graphs.py)."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.specs: dict[str, ShardSpec] = {}
        self.gradients = Gradients()

    def add_up_in(self, gradients: Gradients) -> None:
        """Set the accumulator of gradients.

        Args:
            gradients: shared by all layers of a rank.
        """
        self.gradients = gradients

    def add_gradient(self, name: str, like: Tensor, write: WriteGradient, *, may_wait: bool = True) -> Tensor | None:
        """Add to the named parameter's gradient and return the value for autograd (Gradients.add). For a frozen
        parameter, compute nothing and return None."""
        if not self.specs[name].role.rule.trained:
            return None
        return self.gradients.add(self.get_parameter(name), like, write, may_wait=may_wait)

    def declare(self, name: str, spec: ShardSpec) -> nn.Parameter:
        """Register a parameter of this rank's shape, without values: `initialise` fills it."""
        box = spec.box(self.mesh.grid, self.mesh.rank)
        parameter = nn.Parameter(torch.empty(box.lengths, device="meta" if self.mesh.empty else self.mesh.device))
        self.register_parameter(name, parameter)
        self.specs[name] = spec
        return parameter

    def set_owner(self, owner: tuple[str, int] | None) -> None:
        """Place the layer's whole parameters at (axis, index), with no rows on the axis's other ranks; None: keep."""
        # Declare again, since the shapes change; no value has been drawn yet.
        for name, spec in self.specs.items() if owner is not None else ():
            self.declare(name, replace(spec, owner=owner))

    def add_owned(self, name: str, module: nn.Module, owner: tuple[str, int] | None) -> None:
        """Add a module from user code with its whole parameters at (axis, index); None: on every rank.

        Parameters of plain modules keep their values, which must be equal on every rank.

        Raises:
            ConfigError: for a parameter without a dim, since it cannot be empty on other ranks.
        """
        self.add_module(name, module.to(self.mesh.device))
        layers = [layer for layer in module.modules() if isinstance(layer, ShardedModule)]
        for layer in layers:
            layer.set_owner(owner)
        # Each ShardedModule has specs already; only parameters of plain modules get a spec here.
        declared = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        for path, parameter in module.named_parameters(name):
            if id(parameter) in declared:
                continue
            if parameter.dim() == 0:
                raise ConfigError.of("branches", path, "is a parameter without a dim", "parameters of shape (1,)")
            role = HIDDEN_MATRIX if parameter.dim() > 1 else BIAS
            spec = ShardSpec(tuple(parameter.shape), initial=None, role=role, owner=owner)
            # A clone: a view of no rows would keep the whole parameter's memory alive.
            parameter.data = parameter.data[spec.box(self.mesh.grid, self.mesh.rank).slices].clone()
            self.specs[path] = spec


def freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
    """Freeze each parameter of a model for which `is_frozen(full name)` is true."""
    for path, module in model.named_modules():
        for name, spec in module.specs.items() if isinstance(module, ShardedModule) else ():
            full = f"{path}.{name}" if path else name
            if is_frozen(full):
                module.specs[name] = replace(spec, role=replace(spec.role, rule=FROZEN))
                module.get_parameter(name).requires_grad_(False)


def check_patterns(patterns: Sequence[str], specs: Mapping[str, ShardSpec]) -> None:
    """Raise ConfigError for a pattern of `model.frozen` that matches no parameter, or if nothing is left to train."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in specs):
            # Suggest names with as few levels as the pattern, with `.*` for longer names.
            length = pattern.removesuffix(".*").count(".") + 1
            parts = [name.split(".") for name in specs]
            known = dict.fromkeys(".".join(each[:length]) + ".*" * (len(each) > length) for each in parts)
            near = get_close_matches(pattern, known, n=4, cutoff=0.4) or list(known)[:4]
            raise ConfigError.of("model.frozen", pattern, "matches no parameter", f"{', '.join(near)}, ...")
    # Biases that are updated by signs do not count as trained parameters.
    if patterns and not any(spec.role.rule.by in ("matrices", "elements") for spec in specs.values()):
        rule = "freezes every parameter: nothing is left to train"
        raise ConfigError.of("model.frozen", ", ".join(patterns), rule, "patterns of fewer parameters")


def use_gradients(model: nn.Module, gradients: Gradients) -> None:
    """Set one gradient accumulator for all layers of a model."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.add_up_in(gradients)


def shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the spec of every parameter by full name, in the order of named_parameters()."""
    specs = {
        f"{path}.{name}" if path else name: spec
        for path, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, spec in module.specs.items()
    }
    names = [name for name, _ in model.named_parameters()]
    assert set(names) == set(specs), f"parameters without a spec: {set(names) ^ set(specs)}"
    return {name: specs[name] for name in names}


def num_parameters(specs: Sequence[ShardSpec]) -> int:
    """Count the elements of all parameters of the whole model, each parameter once."""
    return sum(math.prod(spec.shape) for spec in specs)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's random generators on the host and, if `device` is a GPU, on the device."""
    # torch.manual_seed also seeds kinds of devices that are absent, and formats the caller's stack for each kind:
    # 0.2 to 0.5 ms per microbatch.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_of(label: str) -> int:
    """Hash a text to a 63-bit seed, equal on every machine and in every Python process."""
    # Python's own hash() of a text differs from process to process. 63 bits: the seed stays a positive int64.
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def own_stream(label: str, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a stream seeded by a label; the global stream's state is restored afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_generators(seed_of(label), device)
        yield
