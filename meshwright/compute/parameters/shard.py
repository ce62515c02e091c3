"""How a parameter is divided over ranks: ShardSpec, Box, and the base class of layers that declare theirs.

One principle follows from the spec: a gradient is summed over exactly those axes whose ranks feed the parameter
different inputs and do not cut it: axes that split tokens and, for a norm of heads, those that split heads. The same
spec gives initial values, the gradient norm, the parameter count and checkpoints.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
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
        """The index of this box in the global tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.lengths, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The elements in both boxes, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (min(a.stop, b.stop) for a, b in zip(self.slices, other.slices, strict=True))
        lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, lengths) if all(length > 0 for length in lengths) else None

    def within(self, outer: Box) -> Box:
        """This box, counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def flat_parts(self, start: int, stop: int) -> Iterator[Box]:
        """The elements start..stop of this box in row-major order, as at most 2·dims - 1 boxes, in order: a part of a
        row, whole rows, a part of a row."""
        if start >= stop:
            return
        row = Box(self.offsets[1:], self.lengths[1:])
        size = row.num_elements
        # first: the first row that begins in start..stop; last: the row in which stop lies, which is the one before
        # where start..stop begins and ends inside one row.
        first, last = -(-start // size), stop // size
        begin = (first - 1) * size
        rows = [
            (first - 1, 1, row.flat_parts(start - begin, min(stop - begin, size))),
            (first, last - first, (row,) if first < last else ()),
            (last, 1, row.flat_parts(0, stop - last * size) if first <= last else ()),
        ]
        for index, count, parts in rows:
            for part in parts:
                yield Box((self.offsets[0] + index, *part.offsets), (count, *part.lengths))


@dataclass(frozen=True)
class Initial:
    """A parameter's first values: normal with `std` around `mean`; std 0 is a constant."""

    std: float
    mean: float = 0.0


ZEROS = Initial(0.0)
ONES = Initial(0.0, 1.0)


@dataclass(frozen=True)
class Shard:
    """An axis's ranks hold equal parts of a parameter along `dim`, in order; with `copies`, so many neighbours the
    same one, of which each feeds it different inputs."""

    dim: int
    copies: int = 1


Placements = Mapping[str, Shard]
"""A parameter's shards by mesh axis; an axis that is not named holds copies, or the whole at one owner."""


UNPLACED: Placements = {}


@dataclass(frozen=True)
class ShardSpec:
    """Which mesh axis shards which dim of a parameter of global `shape`, as DTensor writes it: {"row": Shard(0)}.

    `role`: the purpose of the parameter. `tied`: the first and the last pipeline stage have a copy each, and its
    gradient is the sum of both. `owner`: (axis, index) where the whole parameter lives; the axis's other ranks hold no
    row of it. `initial` None: the values that it was made with, which are the same on every rank. `partial_over`: axes
    whose ranks feed it different inputs though they split no tokens, such as heads that one norm is for.
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
        """The axes whose ranks hold different parts of this parameter."""
        return frozenset([*self.placements, *([self.owner[0]] if self.owner else [])])

    def box(self, grid: Grid, rank: int) -> Box:
        """The rank's part of the parameter. Cut dims are divisible: the config's rules have seen to it."""
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        for axis, shard in self.placements.items():
            parts = grid.size(axis) // shard.copies
            assert lengths[shard.dim] % parts == 0, f"{self} is not divisible over {axis} of {grid}"
            # Two axes may cut one dim: the later one cuts what the earlier has left, so offsets add up.
            lengths[shard.dim] //= parts
            offsets[shard.dim] += lengths[shard.dim] * (grid.index(rank, axis) // shard.copies)
        if self.owner is not None and grid.index(rank, self.owner[0]) != self.owner[1]:
            # No rows, but declared: names, buckets and collectives are then the same on every rank of the axis.
            lengths[0] = 0
        return Box(tuple(offsets), tuple(lengths))

    def sum_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes over which this parameter's gradient is summed: their ranks feed it different tokens or heads, and
        do not cut it.

        And, of a tied one, the pipeline's ends, which split its uses; of key-value heads, the ranks with a copy.
        """
        # Both ends use a tied table, and each sees only its own part of the gradient.
        ends = (ENDS,) if self.tied else ()
        copies = (HEAD_COPIES,) if any(shard.copies > 1 for shard in self.placements.values()) else ()
        # A rank with other tokens, or other heads of one norm, has another addend; one that cuts the parameter has
        # another parameter. No third case.
        feeding = dict.fromkeys((*mesh.token_axes, *self.partial_over))
        # In the grid's order: equal sets of axes are then one group, one bucket and one comm.
        return mesh.grid.ordered([*(axis for axis in feeding if axis not in self.axes), *copies, *ends])


class ShardedModule(nn.Module):
    """A layer that declares each parameter with its spec. The mesh says which part this rank holds."""

    in_graphs: ClassVar[bool] = False
    """Whether a compiler may look into `forward` (tensor/graphs.py)."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.specs: dict[str, ShardSpec] = {}
        self.gradients = Gradients()

    def add_up_in(self, gradients: Gradients) -> None:
        """Choose where gradients are added up.

        Args:
            gradients: shared by all layers of a rank.
        """
        self.gradients = gradients

    def add_gradient(self, name: str, like: Tensor, write: WriteGradient, *, may_wait: bool = True) -> Tensor | None:
        """Add to the named parameter's gradient; returns what the backward pass hands to autograd (Gradients.add).
        A frozen parameter's is not computed."""
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
        """Let the layer's parameters live whole at (axis, index) and nowhere else on the axis; None: everywhere."""
        # Declared anew, since the shapes change; no value has been drawn yet.
        for name, spec in self.specs.items() if owner is not None else ():
            self.declare(name, replace(spec, owner=owner))

    def add_owned(self, name: str, module: nn.Module, owner: tuple[str, int] | None) -> None:
        """Take in anyone's module, whose parameters live whole at (axis, index); None: everywhere.

        Parameters of plain modules keep the values that they have: every rank makes the same. Raises ConfigError for
        one without a dim, which cannot be empty elsewhere.
        """
        self.add_module(name, module.to(self.mesh.device))
        layers = [layer for layer in module.modules() if isinstance(layer, ShardedModule)]
        for layer in layers:
            layer.set_owner(owner)
        # Layers of ours have specs of their own; only what anyone's plain modules hold is given one here.
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


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze each parameter of a model of which the full name matches one of the patterns (`*`, `?`, `[...]`)."""
    for path, module in model.named_modules():
        for name, spec in module.specs.items() if isinstance(module, ShardedModule) else ():
            full = f"{path}.{name}" if path else name
            if any(fnmatchcase(full, pattern) for pattern in patterns):
                module.specs[name] = replace(spec, role=replace(spec.role, rule=FROZEN))
                module.get_parameter(name).requires_grad_(False)


def check_patterns(patterns: Sequence[str], specs: Mapping[str, ShardSpec]) -> None:
    """Raise ConfigError for a pattern of `model.frozen` that matches no parameter, or if nothing is left to train."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in specs):
            # Names as long as the pattern, which may stand for the beginning of longer ones.
            length = pattern.removesuffix(".*").count(".") + 1
            parts = [name.split(".") for name in specs]
            known = dict.fromkeys(".".join(each[:length]) + ".*" * (len(each) > length) for each in parts)
            near = get_close_matches(pattern, known, n=4, cutoff=0.4) or list(known)[:4]
            raise ConfigError.of("model.frozen", pattern, "matches no parameter", f"{', '.join(near)}, ...")
    # Biases that signs step train nothing by themselves.
    if patterns and not any(spec.role.rule.by in ("matrices", "elements") for spec in specs.values()):
        rule = "freezes every parameter: nothing is left to train"
        raise ConfigError.of("model.frozen", ", ".join(patterns), rule, "patterns of fewer parameters")


def use_gradients(model: nn.Module, gradients: Gradients) -> None:
    """Let all layers of a model add their gradients up in one place."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.add_up_in(gradients)


def shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """The spec of every parameter, by its full name, in the order of named_parameters()."""
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
    """Parameters of the whole model: each counted once, wherever it lives."""
    return sum(math.prod(spec.shape) for spec in specs)


def seed_generators(seed: int, device: torch.device) -> None:
    """Begin torch's random numbers anew, on the host and, where that is a GPU, on the device."""
    # torch.manual_seed also turns to kinds of devices that are not here, and formats the caller's stack for each of
    # them: 0.2 to 0.5 ms a microbatch.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_of(label: str) -> int:
    """A 63-bit seed made of a text: the same on every machine and in every Python process."""
    # Python's own hash() of a text differs from process to process. 63 bits: the seed stays a positive int64.
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def own_stream(label: str, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a stream that a label begins; the common one goes on as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_generators(seed_of(label), device)
        yield
