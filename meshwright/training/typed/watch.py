"""A watch of the tensors in a rank's program on the meta device: the sharding of each, from operator to operator.

A sharding is stored by a tensor's place in memory (storage, offset, sizes, strides), not by the tensor object: autograd
returns new objects for saved tensors, and a bucket is read through many views. A region has the sharding of its last
write.

Python's numbers are not followed: a rank slices a batch by the rank index, which operators do not show. So the program
of a neighbour on each axis is recorded first, and compared while this rank's program runs. A slice with another start
is a cut; a different number makes the result `varying`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.strategies.memory.recompute import tensors_in
from meshwright.training.typed.operators import Call, WrongSum, shardings_of_results
from meshwright.training.typed.sharding import NONE, Axes, Sharding, axes_of, cut_at, joined, reshaped, uncut

Shape = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A tensor's place in the storage: offset, sizes, strides."""

Told = tuple[Any, ...]
"""Arguments: numbers as they are, tensors as Parts."""

Seen = tuple[str, Told, tuple[int, ...]]
"""An operator or a collective: name, arguments, and the indices of the results' storages."""


class Part(NamedTuple):
    """A tensor: index of the storage, offset in the storage, and sizes."""

    storage: int
    offset: int
    sizes: tuple[int, ...]


MODULE = "meshwright_module"
"""The key, in an autograd node's metadata, of the module that made the node."""


EMPTY = frozenset(["empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "zero", "ones_like"])
"""Operators with equal results on every rank."""

AHEAD = 12
"""Number of a neighbour's next operators that are searched for the operator called by this rank."""


def shape_of(x: Tensor) -> Shape:
    return int(x.storage_offset()), tuple(x.shape), tuple(x.stride())


def region_of(x: Tensor) -> tuple[int, int]:
    """Return the range of storage elements that a tensor may touch: the first, and one past the last."""
    start = int(x.storage_offset())
    if x.numel() == 0:
        return start, start
    return start, start + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


@dataclass
class Memory:
    """The shardings in one storage. `writes`: (start, stop, sharding, time), the newest last. `known`: (sharding,
    time) by shape."""

    index: int
    storage: Any
    writes: list[tuple[int, int, Sharding, int]] = field(default_factory=list)
    known: dict[Shape, tuple[Sharding, int]] = field(default_factory=dict)
    declared: list[tuple[str, Tensor, Sharding]] = field(default_factory=list)
    """Parameters, or their gradients, in this storage: name, view, and the sharding from the spec."""

    def names(self, start: int, stop: int) -> list[str]:
        """List the parameters in a region."""
        return [name for name, x, _ in self.declared if region_of(x)[0] < stop and region_of(x)[1] > start]

    def write(self, x: Tensor, sharding: Sharding, time: int) -> None:
        start, stop = region_of(x)
        if start == stop:  # padding of no rows
            return
        # Writes covered by this one are dead.
        self.writes = [w for w in self.writes if w[0] < start or w[1] > stop]
        self.writes.append((start, stop, sharding, time))
        self.known[shape_of(x)] = sharding, time

    def read(self, x: Tensor) -> Sharding:
        start, stop = region_of(x)
        sharding, time = self.known.get(shape_of(x), (None, -1))
        later = [w for w in self.writes if w[3] > time and w[0] < stop and w[1] > start]
        if not later and sharding is not None:
            return sharding
        return together(list(self.held(start, stop)), x.shape)

    def held(self, start: int, stop: int) -> Iterator[Sharding]:
        """Yield the shardings of a region's writes that later writes do not cover."""
        open_runs = [(start, stop)]
        for first, last, sharding, _ in reversed(self.writes):
            touched = [(a, b) for a, b in open_runs if first < b and last > a]
            if touched:
                yield sharding
                pieces = [piece for a, b in touched for piece in ((a, first), (last, b)) if piece[0] < piece[1]]
                open_runs = [run for run in open_runs if run not in touched] + pieces


def together(shardings: Sequence[Sharding], shape: Sequence[int]) -> Sharding:
    """Return the sharding of a tensor read across several writes: partial over an axis if all writes are, `varying` if
    some are."""
    solid = [sharding for sharding in shardings if not sharding.constant]
    if not solid:
        return Sharding(uncut(shape), constant=True)
    if len(shardings) == 1 and math.prod(size for dim in shardings[0].dims for size, _ in dim) == math.prod(shape):
        return reshaped(shardings[0], shape)
    partial = NONE.union(*(sharding.partial for sharding in solid))
    mixed = NONE.union(*(partial - sharding.partial for sharding in solid))
    cuts = {tuple(map(axes_of, sharding.dims)) for sharding in solid}
    dims, lost = uncut(shape), NONE.union(*(sharding.cut for sharding in solid))
    if len(cuts) == 1 and len(solid[0].dims) == len(shape):
        # Runs of rows, written one after the other.
        dims, lost = tuple(((size, axes),) for size, axes in zip(shape, *cuts, strict=True)), NONE
    return joined(solid, dims, lost | mixed, partial)


@dataclass
class Neighbour:
    """The recorded program of the next rank on an axis, and this rank's position in that program.

    `stretches`: the operators between two collectives, which both ranks call. `twins`: the neighbour's storage for each
    storage of this rank, by index.
    """

    axis: str
    stretches: list[list[Seen]]
    stretch: int = 0
    at: int = 0
    twins: dict[int, int] = field(default_factory=dict)

    def next(self, name: str, results: Sequence[int]) -> Told | None:
        """Return the neighbour's arguments of the same operator; None if the neighbour does not call it here."""
        events = self.stretches[self.stretch] if self.stretch < len(self.stretches) else []
        # Programs that differ by an operator (padding, a root's sum) are aligned again within AHEAD operators.
        for at in range(self.at, min(self.at + AHEAD, len(events))):
            operator, told, theirs = events[at]
            if operator == name:
                self.at = at + 1
                self.twins.update(zip(results, theirs, strict=False))
                return told
        return None

    def meet(self, name: str, storages: Sequence[int]) -> Told | None:
        """Advance both programs to a collective, called here with `storages`; return the neighbour's tensors."""
        self.stretch, self.at = self.stretch + 1, 0
        theirs = self.next(name, ())
        for mine, view in zip(storages, theirs or (), strict=False):
            self.twins.setdefault(mine, view.storage)
        return theirs


@cache
def names_of(op: Any) -> tuple[str, str, tuple[str, ...], bool, bool]:
    """Return (name in the schema, name in RULES, names of arguments, whether element-wise, whether a view)."""
    schema = op._schema
    full = schema.name.removeprefix("aten::")
    arguments = tuple(argument.name for argument in schema.arguments)
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return full, full.removesuffix("_"), arguments, torch.Tag.pointwise in op.tags, views


class Watch(TorchDispatchMode):
    """A mode that follows every operator, and compares it with the `neighbours`' programs. `records`: only record this
    program, for use as a neighbour."""

    def __init__(self, neighbours: Sequence[Neighbour] = (), *, records: bool = False) -> None:
        super().__init__()
        self.neighbours, self.records = neighbours, records
        self.stretches: list[list[Seen]] = [[]]
        self._memories: dict[int, Memory] = {}
        self._time = 0
        self._forward: list[str] = []
        self._backward = ""

    def memory(self, x: Tensor) -> Memory:
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self._memories:
            # A reference to the storage prevents reuse of the address.
            self._memories[address] = Memory(len(self._memories), storage)
        return self._memories[address]

    def sharding(self, x: Tensor) -> Sharding:
        """Return a tensor's sharding; a tensor made before the watch began is constant."""
        return self.memory(x).read(x)

    def say(self, x: Tensor, sharding: Sharding, *, view: bool = False) -> None:
        """Record the sharding written into a tensor, or, with `view`, the sharding of memory seen in a new shape."""
        if self.records:
            return
        self._time += 1
        if view:
            self.memory(x).known[shape_of(x)] = sharding, self._time
        else:
            self.memory(x).write(x, sharding, self._time)

    def declare(self, name: str, x: Tensor, sharding: Sharding) -> None:
        """Set the sharding of a parameter, or of a gradient's memory, at the program's start."""
        self.memory(x).declared.append((name, x, sharding))
        self.say(x, sharding)

    def change(self, x: Tensor, rule: Callable[[Sharding, list[str]], Sharding]) -> None:
        """Give each written region of a tensor's memory the sharding `rule(sharding, names of parameters)`."""
        memory, (start, stop) = self.memory(x), region_of(x)
        inside = [w for w in memory.writes if w[0] >= start and w[1] <= stop]
        # A bucket holds several gradients of different shardings.
        if len(inside) < 2 or len(inside) < sum(w[0] < stop and w[1] > start for w in memory.writes):
            self.say(x, rule(self.sharding(x), memory.names(start, stop)))
            return
        self._time += 1
        fresh = [(w[0], w[1], rule(w[2], memory.names(w[0], w[1])), self._time) for w in inside]
        memory.writes = [w for w in memory.writes if w not in inside] + fresh

    def meet(self, verb: str, *tensors: Tensor) -> None:
        """Record that the rank calls a collective with these tensors, and compare with the neighbours' tensors."""
        told = tuple(self._told(x) for x in tensors)
        storages = tuple(view.storage for view in told)
        self.stretches.append([(verb, told, storages)])
        for neighbour in self.neighbours:
            theirs = neighbour.meet(verb, storages) or ()
            for x, local, peer in zip(tensors, told, theirs, strict=False):
                twin = neighbour.twins[local.storage] == peer.storage
                if twin and local.sizes == peer.sizes and local.offset != peer.offset:
                    self.say(x, self._part(x, neighbour.axis, peer.offset - local.offset))

    @property
    def module(self) -> str:
        """Return the module that runs a forward or backward pass now."""
        node: Any = torch._C._current_autograd_node()  # torch's stubs take `metadata` for a method
        if node is not None and (name := node.metadata.get(MODULE)) is not None:
            self._backward = f"the backward pass of {name}"
        # Without a current node autograd accumulates gradients: the last node's module runs.
        return self._forward[-1] if self._forward else self._backward

    @contextmanager
    def placing(self, shardings: Sequence[Sharding], written: Sequence[Tensor] = ()) -> Iterator[None]:
        """Add context to a WrongSum raised inside: the running module, the module that made one of `shardings` partial,
        and the parameters in the memory of `written` tensors."""
        try:
            yield
        except WrongSum as wrong:
            wrong.module_path = self.module
            wrong.names = wrong.names or [name for x in written for name in self.memory(x).names(*region_of(x))]
            wrong.since = next((sharding.since for sharding in shardings if wrong.axis in sharding.partial), "")
            raise

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # .item() of a meta tensor has no value: any number does, if the same on all ranks.
            return 1.0 if args[0].dtype.is_floating_point else 1
        result = op(*args, **(kwargs or {}))
        full, name, names, elementwise, views = names_of(op)
        given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        results = list(tensors_in((result,)))
        told = tuple(self._told(value) for value in given.values())
        storages = tuple(self.memory(x).index for x in results)
        if self.records:
            self.stretches[-1].append((full, told, storages))
            return result
        selected = self.compared(full, told, storages, given)
        if results:
            call = Call(name, given, results, lambda x: self.sharding_given(x, selected), elementwise)
            before = call.shardings
            with self.placing(before, results if full.endswith("_") else ()):
                shardings = shardings_of_results(call)
            for x, sharding in zip(results, shardings, strict=True):
                self.say(x, self.made(name, x, sharding, before, selected), view=views)
        return result

    def made(
        self, name: str, x: Tensor, sharding: Sharding, before: Sequence[Sharding], selected: Selected
    ) -> Sharding:
        """Return a result's sharding, adjusted for differences from the neighbours' calls, with the module that made it
        partial."""
        if sharding.partial and not sharding.since:
            since = (given.since for given in before if given.partial & sharding.partial)
            sharding = replace(sharding, since=next(since, self.module))
        if name not in EMPTY:
            sharding = sharding.loosened(selected.varying)
        for axis, dim in selected.cuts:
            sharding = sharding.loosened([axis]) if dim >= x.dim() else cut_at(sharding, dim, axis)
        return sharding

    def _told(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Part(self.memory(value).index, int(value.storage_offset()), tuple(value.shape))
        if isinstance(value, list | tuple):
            return tuple(self._told(element) for element in value)
        # Objects such as generators are compared by type only: objects of two ranks are never equal.
        return value if isinstance(value, int | float | str | None) else type(value).__name__

    def compared(self, name: str, mine: Told, results: Sequence[int], given: Mapping[str, Any]) -> Selected:
        """Compare the call with the neighbours' calls; return the differences."""
        selected = Selected()
        for neighbour in self.neighbours:
            theirs = neighbour.next(name, results)
            if theirs is None or len(theirs) != len(mine):
                selected.varying |= {neighbour.axis}
                continue
            for (argument, value), local, peer in zip(given.items(), mine, theirs, strict=True):
                self._compare_argument(name, argument, value, (local, peer), neighbour, given, selected)
        return selected

    def _compare_argument(
        self, name: str, argument: str, value: Any, told: tuple[Any, Any], neighbour: Neighbour,
        given: Mapping[str, Any], selected: Selected,
    ) -> None:  # fmt: skip
        local, peer = told
        if (
            isinstance(local, tuple)
            and not isinstance(local, Part)
            and isinstance(peer, tuple)
            and len(local) == len(peer)
        ):
            for inner in zip(value, local, peer, strict=True):
                self._compare_argument(name, argument, inner[0], inner[1:], neighbour, given, selected)
        elif isinstance(local, Part) and isinstance(peer, Part):
            # Storages first seen here existed before the program, and are twins. Storages made separately vary.
            if neighbour.twins.setdefault(local.storage, peer.storage) != peer.storage or local.sizes != peer.sizes:
                selected.varying |= {neighbour.axis}
            elif local.offset != peer.offset:
                # A view with another offset in the same memory is this rank's part.
                selected.parts.append((value, neighbour.axis, peer.offset - local.offset))
        elif local != peer and name == "slice" and argument in ("start", "end"):
            selected.cuts |= {(neighbour.axis, int(given.get("dim", 0)) % given["self"].dim())}
        elif local != peer and name == "arange":
            selected.cuts |= {(neighbour.axis, 0)}
        elif local != peer:
            selected.varying |= {neighbour.axis}

    def sharding_given(self, x: Tensor, selected: Selected) -> Sharding:
        """Return the sharding of an argument, cut if neighbours pass other parts of the same memory."""
        sharding = self.sharding(x)
        for tensor, axis, distance in selected.parts:
            sharding = self._part(x, axis, distance, sharding) if tensor is x else sharding
        return sharding

    def _part(self, x: Tensor, axis: str, distance: int, sharding: Sharding | None = None) -> Sharding:
        """Return the sharding of a view; the view of the axis's next rank begins `distance` elements later."""
        sharding, dim = sharding or self.sharding(x), part_dim(x, distance)
        if axis in sharding.cut | sharding.varying | sharding.unknown:  # the memory is this rank's part already
            return sharding
        return sharding.loosened([axis]) if dim is None or axis in sharding.partial else cut_at(sharding, dim, axis)

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[None]:
        """Install hooks that record, while the context is entered, the module of each operator."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._forward.append(name)))
            hooks.append(module.register_forward_hook(lambda _, __, out, name=name: self.leave(name, out)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def leave(self, name: str, out: Any) -> None:
        """Store the module's name in the autograd nodes made by the module's forward pass."""
        self._forward.pop()
        waiting: list[Any] = [x.grad_fn for x in tensors_in((out,)) if x.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            # Inner modules have ended earlier, and marked their nodes.
            if MODULE not in node.metadata:
                node.metadata[MODULE] = name
                waiting += [before for before, _ in node.next_functions if before is not None]


@dataclass
class Selected:
    """Differences between a call and the neighbours' calls: numbers (`varying`: axes), starts of slices (`cuts`: axis,
    dim), and arguments that are other parts of a tensor (`parts`: tensor, axis, distance in elements)."""

    varying: Axes = NONE
    cuts: frozenset[tuple[str, int]] = frozenset()
    parts: list[tuple[Tensor, str, int]] = field(default_factory=list)


def part_dim(x: Tensor, distance: int) -> int | None:
    """Return the dim along which a view of equal sizes and strides is `distance` elements further; None: no dim."""
    fits = [
        (stride, x.shape[dim] > 1, -dim)
        for dim, stride in enumerate(x.stride())
        if stride and distance % stride == 0 and abs(distance) // stride >= x.shape[dim]
    ]
    return -max(fits)[2] if fits else None
