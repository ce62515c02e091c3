"""Records a script's step: kernels by module and stream, collectives, memory; values are computed only on the host.

A tensor has values if it is small, on the host and computed from tensors with values alone: a loader's batches. All
others are meta tensors. The planner's Recorder gives kernels and live memory; here each is assigned to a phase and a
module. A backward kernel belongs to the module whose forward pass made its autograd node.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshwright.parity.trace import in_backward
from meshwright.planner.adopt.places import Notes, Place, Places
from meshwright.planner.plan.recorder import Kernel, Recorder
from meshwright.ranks.fake_world import RECEIVE, Sending, collective_of, number_work
from meshwright.strategies.memory.recompute import LiveBytes, tensors_in

Phase = Literal["forward", "backward", "recompute", "optimizer", "other"]
MOST_VALUES = 2**24
"""Elements of the largest tensor with values; larger ones have none."""
_SIZED = frozenset(["empty", "zeros", "ones", "full", "rand", "randn", "randint", "empty_strided"])
_SHAPES = frozenset(["nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"])
"""Operations with a result of a shape that depends on values."""


@dataclass(frozen=True)
class Copy:
    """A copy between host and device."""

    to_host: bool
    payload_bytes: int


@dataclass(frozen=True)
class Sync:
    """record, await: an event of a stream by its number; wait: for the collective of the number; host: the host waits
    for all streams, since the script reads a value."""

    kind: Literal["record", "await", "wait", "host"]
    number: int


@dataclass(frozen=True)
class Collective:
    """A collective of the number, and the line that called it."""

    sending: Sending
    number: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An event of a step, in the order of issue."""

    event: Kernel | Copy | Sync | Collective
    phase: Phase
    module: int
    """Number of the module in StepRecorder.modules; -1: outside of modules."""
    stream: int


class StepRecorder(Recorder):
    """A dispatch mode over the whole script. `entries`: events since the last `restart`."""

    def __init__(self, places: Places, notes: Notes) -> None:
        super().__init__()
        self._places, self._notes = places, notes
        self.host: LiveBytes = LiveBytes()
        """Bytes of tensors without values in host memory."""
        self.entries: list[Entry] = []
        self.modules: list[nn.Module] = []
        self.born: dict[int, tuple[Phase, int]] = {}
        """By storage number, the phase and the module of the allocation."""
        self.saved_storages: dict[int, tuple[Phase, int, int]] = {}
        """The storages alive when the backward pass began, with phase, module and bytes."""
        self.buckets: set[int] = set()
        """Storages of tensors that are summed in the backward pass."""
        self.begun, self.peak_at = 0, 0
        """Places in `changes`: the begin of the step, the fullest moment of the step."""
        self.base = 0
        """Live bytes at the begin of the step."""
        self.in_optimizer = self.compiled = False
        self.on_host = places.home == "cpu"
        """True if the host's tensors are counted as the device's: no accelerator, or a model on the host."""
        self._numbers: dict[int, int] = {}
        self._stack: list[int] = []
        self._makers: dict[int, int] = {}
        self._stream, self._collectives, self._passes = 0, 0, 0
        self._sizes: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        """Numbers of functional collectives without a wait, by the storage of the result."""
        self._verdicts: dict[int, str] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return op(*args, **(kwargs or {}))  # DTensor asks for shapes
        if any(
            not issubclass(tensor_class, nn.Parameter | nn.Buffer) and tensor_class is not Tensor
            for tensor_class in types
        ):
            return NotImplemented  # a DTensor: its local operations are seen
        with torch._C.DisableTorchFunction():
            keywords = dict(kwargs or {})
            given = [*tensors_in(args), *tensors_in(keywords.values())]
            asked = keywords.get("device")
            if not any(x.is_meta for x in given) and (asked is None or asked.type != "meta"):
                return self._with_values(op, args, keywords)
            name = op._schema.name.removeprefix("aten::")
            if name in ("_local_scalar_dense", "is_nonzero", "equal"):
                return self._guess(name, given[0])
            places = {self._places.of(x) for x in given if x.is_meta}
            device_type: Place = "cuda" if "cuda" in places else min(places, default=self._places.home)
            # A copy to another place is a clone whose result is placed by the caller.
            names_place = not places or asked is not None or name in ("clone", "_to_copy")
            target = self._places.asked if names_place and self._places.asked else device_type
            if name == "copy_":
                target = self._places.of(given[0])
            if op._schema.is_mutable and given and not given[0].is_meta and (given[0].dim() or name == "copy_"):
                if given[0].dim():
                    self._notes.add("value", f"{name} writes computed values into host memory: the old values stay")
                return args[0] if op._schema.returns else None
            return self._without_values(op, name, args, keywords, target)

    def _with_values(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Compute on the host. A large tensor is made without values."""
        name = op._schema.name.removeprefix("aten::")
        sizes = next((value for value in args if isinstance(value, list)), [])
        # A program on the host makes its buffers there, such as FSDP2's for collectives.
        inside = self.on_host and (bool(self._stack) or in_backward())
        # A buffer for a message is made before the model is called.
        inside |= self._places.home == "cpu" and name in ("empty", "empty_strided")
        computes = inside and (keywords.get("dtype") or torch.float32).is_floating_point
        sized = all(isinstance(size, int) for size in sizes)
        if name in _SIZED and sized and (computes or math.prod(sizes) > MOST_VALUES):
            keywords = {**keywords, "device": torch.device("meta")}
            keywords.pop("pin_memory", None)
            return self._without_values(op, name, args, keywords, "cpu")
        result = op(*args, **keywords)
        if self.on_host:
            # Inputs on the host of a model on the host; indices are a loader's, which no plan counts.
            floats = tuple(x for x in tensors_in((result,)) if x.is_floating_point())
            self.follow([*tensors_in(args), *tensors_in(keywords.values())], floats)
        sending = collective_of(op, args, result)
        if sending is not None:
            number_work(result, 0)
            if sending.verb == RECEIVE:
                self._notes.add("process", "a message of another rank to host memory: ones are assumed")
                for x in tensors_in(args):
                    x.fill_(1)
        return result

    def _without_values(
        self, op: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any], device_type: Place
    ) -> Any:
        args, keywords = tree_map(self._bare, self._indexed(name, args)), tree_map(self._bare, keywords)
        given = [*tensors_in(args), *tensors_in(keywords.values())]
        known = None
        with_shape = self._shape_of(name, args)
        if with_shape is not None:
            result = with_shape
        else:
            result, known = self.computed(op, name, args, keywords, given)
        if not name.endswith("::_wrap_tensor_autograd"):
            for x in given if self._pending else ():
                self.waited(self._pending.pop(x.untyped_storage()._cdata, 0))  # the first use of a sum waits for it
        moves = name in ("clone", "_to_copy", "copy_") and len({self._places.of(x) for x in given} | {device_type}) > 1
        here = {x.untyped_storage()._cdata for x in given}
        for x in tensors_in((result,)):
            if x.is_meta and x.untyped_storage()._cdata not in here:
                self._places.mark(x, device_type)
        sending = collective_of(op, args, result)
        if device_type == "meta":
            return result
        if device_type == "cpu" and not self.on_host and not moves:
            self.host.follow(given, result)
            return result
        results, new = (self.host.follow if device_type == "cpu" and not self.on_host else self.follow)(given, result)
        if name in ("all", "any") and results:
            self._verdicts[results[0].untyped_storage()._cdata] = name
        if sending is not None:
            self._collectives += 1
            number_work(result, self._collectives)
            self._enter(Collective(sending, self._collectives))
            if self.now()[0] == "backward":
                self.buckets |= {self.number_of(x) for x in given}
            self._pending |= {x.untyped_storage()._cdata: self._collectives for x in results}
        elif name.endswith("::_wrap_tensor_autograd"):
            self._pending[results[0].untyped_storage()._cdata] = self._pending.pop(given[0].untyped_storage()._cdata, 0)
        elif moves:
            size = sum(x.numel() * x.element_size() for x in results)
            self._enter(Copy(device_type == "cpu", size))
        elif op._schema.name.partition("::")[0] not in ("c10d", "_c10d_functional"):
            self.add_kernels(op, name, args, keywords, known, given, results, new)
        return result

    def add_kernels(
        self, op: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any], known: Any, given: list[Tensor],
        results: list[Tensor], new: list[Tensor],
    ) -> None:  # fmt: skip
        """Record the kernels of an operation."""
        if not op._schema.name.startswith("aten::"):
            self._notes.add("kernel", f"{op._schema.name} is no operation of torch: only its bytes are counted")
        if op._schema.is_mutable and not results:
            results = list(tensors_in(args[:1]))  # a foreach operation writes its first list
        self._fuses_elements = self.compiled and not self.in_optimizer
        self._note(op, args, keywords, known, given, results, new)
        self._collect()

    def _collect(self) -> None:
        """Assign the kernels that the planner's recorder has completed."""
        events, self._events = self._events, []
        phase, module = self.now() if events else ("other", -1)
        self.entries += [Entry(event, phase, module, self._stream) for event in events if isinstance(event, Kernel)]

    def computed(
        self, op: Any, name: str, args: tuple[Any, ...], keywords: dict[str, Any], given: list[Tensor]
    ) -> tuple[Any, Any]:
        """Compute an operation on meta tensors. Returns the result, and the tensors that the operation saw."""
        try:
            return self._result_of(op, args, keywords, given)
        except NotImplementedError:
            # Kernels of a GPU that only write their arguments, such as a fused optimizer's.
            if not op._schema.is_mutable:
                raise
            self._notes.add("kernel", f"{name} has no form on meta tensors: only its bytes are counted")
            return (args[0] if op._schema.returns else None), None

    def _bare(self, x: Any) -> Any:
        """Return a tensor without values for a tensor with values, next to other tensors without."""
        if isinstance(x, Tensor) and not x.is_meta and x.dim():
            bare = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self._places.mark(bare, "cpu")
            return bare
        return torch.device("meta") if isinstance(x, torch.device) else x

    def _indexed(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace masks among indices by indices: exact for a mask with values, all rows for a mask without."""
        if name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if not isinstance(index, Tensor) or index.dtype != torch.bool:
                indices.append(index)
            elif index.is_meta:
                self._notes.add("shape", f"{name} by a mask of computed values: all {index.numel()} elements are taken")
                rows = torch.empty(index.numel(), dtype=torch.int64, device="meta")
                indices += [rows] * index.dim()
            else:
                indices += list(index.nonzero(as_tuple=True))
        return (args[0], indices, *args[2:])

    def _shape_of(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the result of an operation with a shape that depends on values, at its largest."""
        empty = lambda *shape, dtype=torch.int64: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
        x = args[0] if args and isinstance(args[0], Tensor) else None
        open_repeat = name == "repeat_interleave" and len(args) == 1
        if x is None or not (name in _SHAPES or open_repeat):
            return None
        self._notes.add("shape", f"{name} of computed values: the largest shape, of {x.numel()} elements")
        if name == "nonzero":
            return empty(x.numel(), x.dim())
        if name == "masked_select" or open_repeat:
            return empty(x.numel(), dtype=x.dtype)
        if name == "bincount":
            return empty(max([x.numel(), *args[2:3]]))
        return torch.empty_like(x.flatten()), empty(*x.shape), empty(x.numel())

    def _guess(self, name: str, x: Tensor) -> Any:
        """Return a value for a tensor without: a script that asks is noted."""
        verdict = self._verdicts.get(x.untyped_storage()._cdata, "")
        frame: FrameType | None = sys._getframe(2)
        scales = False
        for _ in range(8):
            scales |= frame is not None and frame.f_code.co_filename.endswith("grad_scaler.py")
            frame = frame.f_back if frame is not None else None
        guess: Any = verdict == "all" or name == "equal"
        if x.dtype != torch.bool and name == "_local_scalar_dense":
            guess = (0.0 if scales else 1.0) if x.dtype.is_floating_point else 1
        self._enter(Sync("host", 0))
        self._notes.add("value", f"a number is read from computed values: {guess} is assumed")
        return guess

    def _enter(self, event: Kernel | Copy | Sync | Collective) -> None:
        self._end_row()
        self._collect()
        phase, module = self.now()
        self.entries.append(Entry(event, phase, module, self._stream))

    def now(self) -> tuple[Phase, int]:
        """Return the phase and the number of the module that runs."""
        if self.in_optimizer:
            return "optimizer", -1
        if not in_backward():
            module = self._stack[-1] if self._stack else -1
            self._makers[torch._C._autograd._get_sequence_nr() - 1] = module
            return ("forward" if self._stack else "other"), module
        if not self.saved_storages and self.live:
            alive = {storage_id for storage_id, _ in self._storages.values()}
            self.saved_storages = {
                storage_id: (*self.born[storage_id], self._sizes[storage_id])
                for storage_id in alive
                if storage_id in self.born
            }
        if self._stack:
            return "recompute", self._stack[-1]
        node = torch._C._current_autograd_node()
        return "backward", -1 if node is None else self._makers.get(node._sequence_nr(), -1)

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._storages:
            return
        self._number += 1
        storage_id = self._number
        self.born[storage_id] = self.now()
        self._resize(storage_id, size)

        def gone(_: object) -> None:
            del self._storages[address]
            self._resize(storage_id, 0)
            del self._sizes[storage_id]

        self._storages[address] = storage_id, weakref.ref(storage, gone)

    def _resize(self, storage_id: int, size: int) -> None:
        before = self._sizes.get(storage_id, 0)
        self._sizes[storage_id] = size
        for change in (-before, size):
            if change:
                self.changes.append((storage_id, change))
        self.live += size - before
        if self.live > self.peak:
            self.peak, self.peak_at = self.live, len(self.changes)

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that is alive, by number."""
        return dict(self._sizes)

    def compute_on_host(self, tensors: Sequence[Tensor]) -> None:
        """Follow the host's tensors as the device's from now on: the script's model is there."""
        self.on_host = True
        with torch._C.DisableTorchFunction():
            for x in local_tensors(tensors):
                self._follow(x)

    def resized(self, storage: Any, size: int) -> None:
        """Follow a storage that the script frees or fills again, as FSDP2 does."""
        if storage._cdata in self._storages:
            self._resize(self._storages[storage._cdata][0], size)

    def enter_module(self, module: nn.Module) -> None:
        """Assign following kernels to a module, numbered by its first call."""
        module_index = self._numbers.get(id(module))
        if module_index is None:
            module_index = self._numbers[id(module)] = len(self.modules)
            self.modules.append(module)
        self._stack.append(module_index)

    def leave_module(self, module: nn.Module) -> None:
        """Assign following kernels to the module that called this one."""
        module_index = self._numbers.get(id(module))
        # An exception may have left inner modules without their hooks.
        while self._stack and module_index in self._stack:
            if self._stack.pop() == module_index:
                break

    @property
    def depth(self) -> int:
        """The number of modules that are running."""
        return len(self._stack)

    def use_stream(self, stream: int) -> None:
        """Issue following events on a stream."""
        self._stream = stream

    def event(self, action: Any, event: int) -> None:
        """Record an event of a stream, or a wait for one."""
        self._enter(Sync(action, event))

    def waited(self, collective: int) -> None:
        """Record a wait for a collective."""
        if collective:
            self._enter(Sync("wait", collective))

    def next_step(self) -> int:
        """Return the place of the first entry of the next step: a stage receives before it calls its model."""
        stepped = max((n for n, entry in enumerate(self.entries) if entry.phase == "optimizer"), default=None)
        later = range(len(self.entries) if stepped is None else stepped, len(self.entries))
        events = ((n, self.entries[n].event) for n in later)
        received = (n for n, event in events if isinstance(event, Collective) and event.sending.verb == RECEIVE)
        return next(received, len(self.entries))

    def restart(self) -> None:
        """Begin a step: forget the entries of the step before, and set the peak to the live bytes."""
        self.entries, self.saved_storages, self._makers = self.entries[self.next_step() :], {}, {}
        self.born = {storage_id: self.born[storage_id] for storage_id in self._sizes}
        self.peak, self.base = self.live, self.live
        self.begun = self.peak_at = len(self.changes)

    def finish(self) -> None:
        """Complete the entries of the step."""
        self._end_row()
        self._collect()


def local_tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return tensors, of a DTensor its local part."""
    return [x._local_tensor if hasattr(x, "_local_tensor") else x for x in values]
