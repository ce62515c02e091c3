"""A recorder of a rank's tasks on meta tensors: kernels and collectives in the order in which these begin.

While a Recorder is entered, each operation on meta tensors is recorded as a kernel, and live memory is followed
(memory/recompute.py). The recorder also observes the collectives of a planned mesh (ranks/planned.py).

| kind      | a kernel that                                                                    |
|-----------|----------------------------------------------------------------------------------|
| product   | multiplies matrices                                                              |
| attention | is a fused attention; a causal one counts half of the products                   |
| special   | takes exponentials, logarithms, error functions: expensive on a CPU              |
| random    | draws random numbers                                                             |
| norm      | normalises rows, which takes sums of rows                                        |
| norm back | is a norm's backward pass, which takes sums of columns as well                   |
| cast      | converts half precision to FP8                                                   |
| element   | does anything else, at memory bandwidth                                          |

If a program fuses element kernels (Software.fuses_elements: torch.compile's Inductor, Transformer Engine), consecutive
ones are one kernel. This kernel reads tensors from outside of the fusion, and writes tensors that are alive when the
next product, collective or lookup begins.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.ranks.comm import Work
from meshwright.ranks.ledger import HOST, TO_HOST, Ledger, Traffic
from meshwright.strategies.memory.recompute import LiveBytes, tensors_in

ElementKind = Literal["special", "random", "mixed", "strided", "sum", "cast", "element"]
KernelKind = Literal[
    "product", "attention", "norm", "norm back", "special", "random", "mixed", "strided", "sum", "cast", "element"
]
SOFTMAXES = frozenset(["softmax", "_softmax", "log_softmax", "_log_softmax"])
LowProducts = Literal["fp8", "mxfp8"]
Recomputed = Literal["layernorm", "moe_act", "mla_up_proj"]
"""Megatron-Core's words for parts of layers whose results are not kept (core/transformer/transformer_config.py,
recompute_modules)."""
SCALED_BY = {"mxfp8": 32}
"""Elements of a tensor that share a scale of one byte, by format; without an entry a tensor has one scale (MX
specification of the Open Compute Project, 2023)."""


class Kernel(NamedTuple):
    """An operation on the device."""

    kind: KernelKind
    flops: float
    touched_bytes: int
    """Bytes read and written."""
    elements: int
    """Elements of the largest tensor among inputs and results."""
    dtype: str
    side: float = 0.0
    """Cube root of m n k of one product of a batch of `members`; the columns of a norm or a softmax."""
    times: int = 1
    """The number of equal consecutive kernels."""
    members: int = 1
    operation: str = ""
    """torch's name, or COMPILED for several operations in one kernel."""


class Start(NamedTuple):
    """The begin of a collective."""

    number: int
    axes: str
    """The axes of its comm (`row`, `data+row`)."""
    verb: str
    payload_bytes: int
    """Bytes of the whole tensor; ledger.py gives the share that is sent."""
    root: int | None = None
    """The index of the root, for a rooted verb."""
    times: int = 1
    """The number of equal consecutive collectives."""


class HostCopy(NamedTuple):
    """The begin of a copy between the device and host memory, on a separate lane."""

    number: int
    to_host: bool
    payload_bytes: int
    times: int = 1


class WaitFor(NamedTuple):
    """The rank waits for the end of the collective or of the copy `number`."""

    number: int


_Event = Kernel | Start | HostCopy | WaitFor

MemoryEvents = tuple[tuple[int, int], ...]
"""(storage number, bytes) in order; negative bytes: the storage is freed. Numbers are unique within a recording."""


@dataclass(frozen=True)
class Program:
    """A recorded task."""

    events: tuple[_Event, ...] = ()
    kept_bytes: int = 0
    """Live bytes at the end minus live bytes at the begin."""
    peak_bytes: int = 0
    """The most live bytes, less the live bytes at the begin."""
    traffic: Mapping[tuple[str, str], Traffic] = field(default_factory=dict)
    """Sent bytes, as in a run's ledger."""
    leads: int = 1
    """Ranks that wait while this rank works, except between a verb with this root and the next verb to it (sub-graphs).
    """
    memory: MemoryEvents = ()
    """Every allocation and free in order."""

    @cached_property
    def flops(self) -> float:
        return sum(event.times * event.flops for event in self.events if isinstance(event, Kernel))

    @cached_property
    def host_bytes(self) -> int:
        """Bytes in host memory at the end, less the bytes at the begin."""
        copies = (event for event in self.events if isinstance(event, HostCopy))
        return sum(copy.times * copy.payload_bytes * (1 if copy.to_host else -1) for copy in copies)


Seconds = Callable[[Program], float]


class Cost(NamedTuple):
    """Seconds, bytes and flops of a task or of a part; bytes as in Program."""

    seconds: float = 0.0
    kept_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0
    host_bytes: int = 0

    def then(self, later: Cost) -> Cost:
        """Return the cost of this task followed by the other."""
        return Cost(
            self.seconds + later.seconds,
            self.kept_bytes + later.kept_bytes,
            # The second task's peak is added to the bytes kept by the first.
            max(self.peak_bytes, self.kept_bytes + later.peak_bytes),
            self.flops + later.flops,
            self.host_bytes + later.host_bytes,
        )

    def extended(self, step: Cost, times: int) -> Cost:
        """Extrapolate a group of layers from recordings of two (self) and of one (`step`): self + times * (self -
        step)."""
        return Cost(
            self.seconds + times * (self.seconds - step.seconds),
            self.kept_bytes + times * (self.kept_bytes - step.kept_bytes),
            self.peak_bytes + times * (self.peak_bytes - step.peak_bytes),
            self.flops + times * (self.flops - step.flops),
            self.host_bytes + times * (self.host_bytes - step.host_bytes),
        )


DISTINCT = 3
"""The number of programs of a task in a step: the first microbatch's, the last one's, one for all between."""


@dataclass(frozen=True)
class PieceCosts:
    """A task in pieces (pieces.py): the cost of each piece of the chunk, and seconds of the exchange after each."""

    costs: tuple[Cost, ...]
    trades: tuple[float, ...]


def place(microbatch: int, num_microbatches: int) -> int:
    """Return the index of a microbatch's program among at most DISTINCT."""
    # The last microbatch completes gradients, also in a step of one or two microbatches.
    if microbatch == num_microbatches - 1:
        return min(num_microbatches, DISTINCT) - 1
    return min(microbatch, 1)


COMPILED = "compiled"
"""The operation of several element kernels in one."""
_GROUPED = "_grouped_mm"
"""The products of all experts by one kernel."""
_FLAT = frozenset(["mm", "addmm", "addmm_", _GROUPED])
"""Products of linears, which run in FP8; attention's batched products do not."""
BATCHED = frozenset(["bmm", "baddbmm"])
_FUSED = frozenset([*get_args(ElementKind), "norm", "norm back"])
_PRODUCTS = {
    "mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1, "_scaled_mm": 0, _GROUPED: 0,
}  # fmt: skip
"""Products of matrices: index of the argument that is the first factor."""
CONVOLUTIONS = {"convolution": 1, "convolution_backward": 2}
"""Convolutions, with the number of products in multiples of a forward pass."""
ATTENTIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1.0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2.5),
    "_scaled_dot_product_flash_attention": (0, 1.0),
    "_scaled_dot_product_flash_attention_backward": (1, 2.5),
    "_scaled_dot_product_efficient_attention": (0, 1.0),
    "_scaled_dot_product_efficient_attention_backward": (1, 2.5),
}
"""Fused attentions: the index of the query among the arguments, and products in multiples of a forward pass."""
WINDOWED = {"_flash_attention_forward": (0, 5, 1.0), "_flash_attention_backward": (1, 8, 2.5)}
"""FlashAttention of rows with a window: as ATTENTIONS, with the index of the longest row's number of tokens."""
SPECIAL = frozenset([
    "exp", "log", "tanh", "sigmoid", "gelu", "gelu_backward", "silu", "silu_backward", "erf", "logsumexp",
    "softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax",
])  # fmt: skip
NORMS: dict[str, KernelKind] = {
    "native_layer_norm": "norm", "native_group_norm": "norm",
    "native_layer_norm_backward": "norm back", "native_group_norm_backward": "norm back",
}  # fmt: skip
MAGNITUDES = "linalg_vector_norm"
"""The operation of layers that finds the scales of a matrix in FP8."""
RANDOM = frozenset(["bernoulli", "native_dropout", "uniform", "normal", "rand_like", "rand"])
LOOKUPS = frozenset(["embedding", "gather", "index", "index_select", "nll_loss_forward"])
"""Operations that read, of the first tensor, only the bytes of the result."""
UPDATES = frozenset(["index_put_", "index_add_", "scatter_", "scatter_add_"])
"""Operations that read and write, of the first tensor, only the bytes of the last tensor."""
SCATTERED = LOOKUPS | UPDATES
WRITES = frozenset(["copy_", "fill_", "zero_"])
"""Operations that overwrite a tensor without reading this tensor."""
UNREAD = {"nll_loss_backward": 1}
"""Operations with a tensor that gives a shape alone: the index among the tensors."""
JOINS = frozenset(["cat", "stack"])
"""Operations whose inputs are parts of the result."""
NOTHING = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"])
"""Operations that allocate and launch no kernel."""
VIEWS = frozenset([
    "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
])  # fmt: skip
"""Operations whose results are views of the first argument: neither memory nor a kernel."""
_OUT = re.compile("(.*_)?out")
"""Overloads that write into a tensor given by the caller."""


@dataclass(frozen=True)
class UnderWay:
    """The Work of a recorded collective; `wait` records a WaitFor."""

    wait: Callable[[], None]


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


class _Value(NamedTuple):
    """A result that is no tensor, such as an attention's number of queries."""

    value: int | None


@dataclass(slots=True)
class _Known:
    """The results of an operation on inputs of given shapes, strides and dtypes."""

    results: tuple[Form | int | _Value, ...] = ()
    """For each result the form of a new tensor, the index of the returned input, or a value. Empty if results share
    storages: then torch is called each time."""
    kind: type | None = None
    """List or tuple of results; None: a single result."""
    kernel: Kernel | None = None
    """The kernel, if forms alone determine it."""


_KNOWN: dict[Hashable, _Known] = {}
"""_Known by (operation, forms of the inputs)."""
_META = torch.device("meta")


class LowCopy:
    """The tensors kept in place of a tensor: in a format of products, numbers and scales of blocks."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


def _shapes_in(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return the values, with (shape, strides, dtype) for each tensor. Raises TypeError for a tensor with values."""
    shapes: list[Hashable] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                raise TypeError("a tensor with values")
            shapes.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            shapes.append(_shapes_in(value))
        else:
            # 1, 1.0 and True are equal as keys but give tensors of different dtypes.
            shapes.append((type(value), value))
    return tuple(shapes)


def form_of(x: Tensor) -> Form:
    """Return a tensor's shape, strides and dtype."""
    return tuple(x.shape), x.stride(), x.dtype


def _known_of(result: Any, given: list[Tensor], before: list[Form]) -> _Known:
    """Return the entry of _KNOWN for a call. `before`: forms of the inputs before the call."""
    several = type(result) in (list, tuple)
    if not (several or isinstance(result, Tensor)):
        return _Known()
    addresses = {x.untyped_storage()._cdata for x in given}
    made: list[Form | int | _Value] = []
    for output in result if several else (result,):
        if output is None or isinstance(output, int):
            made.append(_Value(output))
            continue
        # An input may be given twice, for example as operand and as destination.
        index = next((index for index, x in enumerate(given) if x is output), None)
        if index is not None and before[index] == form_of(output):
            made.append(index)
            continue
        storage = output.untyped_storage() if isinstance(output, Tensor) and output.is_meta else None
        whole = storage is not None and storage.nbytes() == output.numel() * output.element_size()
        if storage is None or not whole or storage._cdata in addresses:
            return _Known()
        addresses.add(storage._cdata)
        made.append(form_of(output))
    return _Known(tuple(made), type(result) if several else None)


class Recorder(LiveBytes):
    """Records the programs of a rank.

    Args:
        fuses_dropout: As in Software.
        fuses_elements: As in Software.
        fast_norms: Whether norms run at memory bandwidth.
        products: The format of linears' half-precision products.
        low_inputs: Whether linears' inputs are kept for the backward pass in the products' format.
        recomputed: As in Software.
        host_layers: As in Software.
    """

    def __init__(
        self, *, fuses_dropout: bool = False, fuses_elements: bool = False, fast_norms: bool = False,
        products: LowProducts | None = None, low_inputs: bool = False, recomputed: frozenset[Recomputed] = frozenset(),
        host_layers: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.recomputed, self.host_layers = recomputed, host_layers
        self.low_inputs = low_inputs and products is not None
        self._fuses_dropout, self._fuses_elements = fuses_dropout, fuses_elements
        self._fast_norms, self._products = fast_norms, products
        self._row = _Row()
        self._casts: dict[int, weakref.ref[Any]] = {}  # storages that have an FP8 copy
        self._narrowed: dict[int, tuple[weakref.ref[Any], weakref.ref[LowCopy]]] = {}  # storages with kept copies
        self._fused: set[int] = set()  # storages of the program that element kernels have written
        self._dropped: int | None = None  # storage written by the last kernel, if it is a dropout
        self._events: list[_Event] = []
        self._starts = 0
        self._ledger = Ledger()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # as LiveBytes
            if _facts(op).is_view:  # half of all calls
                return op(*args, **(kwargs or {}))
            given = [*tensors_in(args), *(tensors_in(kwargs.values()) if kwargs else ())]
            result, known = self._result_of(op, args, kwargs or {}, given)
            if known is None or not known.results:
                results, new = self.follow(given, result)
            else:  # a result with a form is new
                made = (result,) if known.kind is None else result
                results = [x for x in made if isinstance(x, Tensor)]
                new = [x for x, form in zip(made, known.results, strict=True) if type(form) is tuple]
                for x in new:
                    self._follow(x)
            self._note(op, args, kwargs or {}, known, given, results, new)
        return result

    def _result_of(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor]
    ) -> tuple[Any, _Known | None]:
        """Return the operation's results on meta tensors. Forms alone determine results, so torch is called once for
        each form."""
        # torch computes a meta result's form in Python, which took most of a recording's seconds.
        try:
            key = id(op), _shapes_in(args), (_shapes_in(kwargs.values()), tuple(kwargs)) if kwargs else None
            known = _KNOWN.get(key)
        except TypeError:  # an argument that cannot be hashed, or a tensor that is not meta
            return op(*args, **kwargs), None
        if known is None:
            before = [form_of(x) for x in given]
            result = op(*args, **kwargs)
            known = _KNOWN[key] = _known_of(result, given, before)
            return result, known
        if not known.results:
            return op(*args, **kwargs), known
        made = [
            given[form] if isinstance(form, int)
            else form.value if isinstance(form, _Value)
            else torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
            for form in known.results
        ]  # fmt: skip
        return made[0] if known.kind is None else known.kind(made), known

    def _note(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: _Known | None, given: list[Tensor],
        results: list[Tensor], new: list[Tensor],
    ) -> None:  # fmt: skip
        name, mutates, overwrites, _ = _facts(op)
        # A view neither allocates nor writes, and torch launches no kernel.
        if name not in NOTHING and (given or results) and (new or mutates or not results):
            # The last inputs of an out= overload are written, not read.
            given = given[: len(given) - len(results)] if overwrites else given
            kernel = known.kernel if known is not None else None
            if kernel is None:
                kernel = _kernel(op, name, args, kwargs, given, results)
                # If strides show that no two elements share memory, forms alone determine the touched bytes.
                if known is not None and all(
                    x.numel() <= 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
                    for x in (*given, *results)
                ):
                    known.kernel = kernel
            if self._ledger.times != 1:
                kernel = kernel._replace(times=self._ledger.times)
            if self._fast_norms and kernel.kind in NORMS.values():
                kernel = kernel._replace(kind="element")
            if self._products and name in _FLAT and kernel.dtype in ("bf16", "fp16"):
                operands = args[_PRODUCTS[name] :][:2]
                self._cast(operands)
                # Operands have half of the bytes; the result, and sums that the result is added to, have all.
                touched = kernel.touched_bytes - sum(map(_size_bytes, operands)) // 2
                kernel = kernel._replace(dtype=self._products, touched_bytes=touched)
            if kernel.kind == "cast" and given[0].stride() != results[0].stride():
                self._end_row()  # a transposing cast is a separate kernel, after the sums of columns
            if self._fuses_elements and kernel.kind in _FUSED and name not in SCATTERED:
                if self._row.kernels and self._row.kernels[-1].times != kernel.times:
                    self._end_row()
                read = {(self.number_of(x), int(x.storage_offset())): _size_bytes(x) for x in given}
                written = {self.number_of(x): _size_bytes(x) for x in results}
                if kernel.kind == "cast" or name == MAGNITUDES:
                    # The kernel that makes a tensor also casts this tensor, although a product is issued before the
                    # cast.
                    read = {region: size for region, size in read.items() if region[0] not in self._fused}
                self._fused.update(written)
                self._row.add(kernel, read, written)
                return
            self._end_row()
            if name == "add" and self._dropped is not None and self._dropped in map(self.number_of, given):
                # Dropout and the residual's sum are one kernel: the bytes between the two are neither written nor read.
                dropout = self._events.pop()
                assert isinstance(dropout, Kernel)
                touched = dropout.touched_bytes + kernel.touched_bytes - 2 * _size_bytes(results[0])
                kernel = dropout._replace(touched_bytes=touched)
            if name == "softmax" and kernel.touched_bytes != 2 * _size_bytes(results[0]):
                # torch casts a softmax's input of another dtype by a separate kernel.
                self._events.append(kernel._replace(kind="mixed", operation="_to_copy"))
                kernel = kernel._replace(touched_bytes=2 * _size_bytes(results[0]))
            self._events.append(kernel)
            # native_dropout returns (output, mask); the residual's sum reads the output.
            drops = self._fuses_dropout and name == "native_dropout"
            self._dropped = self.number_of(results[0]) if drops else None

    def cut(self) -> None:
        """End a fusion of element kernels: the next ones belong to another compiled function."""
        self._end_row()

    def as_one(self, kernel_kind: KernelKind | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as if compiled: consecutive element kernels are one, of `kernel_kind` if given, and only
        results exist."""

        @wraps(function)
        def run(*args: Any) -> Any:
            self._end_row()
            fuses, peak, first = self._fuses_elements, self.peak, len(self.changes)
            self._fuses_elements = True
            result = function(*args)
            self._end_row(kernel_kind)
            self._fuses_elements, self.peak = fuses, max(peak, self.live)
            inside = self.changes[first:]
            freed = {storage_id for storage_id, size in inside if size < 0} & {
                storage_id for storage_id, size in inside if size > 0
            }
            self.changes[first:] = [change for change in inside if change[0] not in freed]
            return result

        return run

    def _cast(self, operands: Iterable[Tensor]) -> None:
        """Record a cast of each operand without an FP8 copy. A cast reads once and writes both orders of the matrix,
        since FP8 products take one order only (Transformer Engine's cast_transpose)."""
        for x in operands:
            storage = x.untyped_storage()
            known = self._casts.get(storage._cdata)
            if known is None or known() is not storage:
                self._casts[storage._cdata] = weakref.ref(storage)
                size = x.numel() * (x.element_size() + 2)
                self._write(Kernel("cast", 0.0, size, x.numel(), "bf16", times=self._ledger.times))

    def narrowed(self, x: Tensor) -> LowCopy:
        """Return a copy of a product's operand in the products' format, in one order, as the cast that was recorded
        allocates it. Operands on one storage share a copy."""
        assert self._products, "products in the run's format have no copies"
        storage = x.untyped_storage()
        known = self._narrowed.get(storage._cdata)
        copy = known[1]() if known is not None and known[0]() is storage else None
        if copy is None:
            share = SCALED_BY.get(self._products)
            sizes = [x.numel(), *([] if share is None else [-(-x.numel() // share)])]
            copy = LowCopy(*(torch.empty(size, dtype=torch.uint8, device=_META) for size in sizes))
            self._narrowed[storage._cdata] = weakref.ref(storage), weakref.ref(copy)
        return copy

    def widened(self, copy: LowCopy, form: Form) -> Tensor:
        """Return an operand of the form that a copy was narrowed from, which holds the copy and allocates nothing."""
        with _disable_current_modes():
            x = torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
        storage = x.untyped_storage()
        self._casts[storage._cdata] = weakref.ref(storage)  # in the products' format already
        storage.narrow = copy  # type: ignore[attr-defined]
        return x

    def _end_row(self, kernel_kind: KernelKind | None = None) -> None:
        """Record the pending element kernels as one kernel, of `kernel_kind` if given."""
        if self._row.kernels:
            kernel = self._row.fused({storage_id for storage_id, _ in self._storages.values()})
            self._events.append(kernel._replace(kind=kernel_kind or kernel.kind))
            self._row = _Row()

    def started(self, axes: str, verb: str, payload_bytes: int, root: int | None) -> Work:
        """Record the begin of a collective, or of a copy to or from the host (planned.Observer)."""
        self._starts += 1
        self._dropped = None
        times = self._ledger.times
        self._write(
            HostCopy(self._starts, verb == TO_HOST, payload_bytes, times)
            if axes == HOST
            else Start(self._starts, axes, verb, payload_bytes, root, times)
        )
        return UnderWay(partial(self._write, WaitFor(self._starts)))

    def copy_beside(self, sizes: Sequence[int], *, to_host: bool) -> None:
        """Record a copy of tensors of these sizes between the device and host memory, of an equal layer before or
        ahead. The copy begins with the program and ends before the program's end; its tensors are on the device until
        then."""
        self._end_row()
        self._starts += 1
        self._events.insert(0, HostCopy(self._starts, to_host, sum(sizes), self._ledger.times))
        self._events.append(WaitFor(self._starts))
        numbers = range(self._number + 1, self._number + 1 + len(sizes))
        self._number += len(sizes)
        self.changes[:0] = zip(numbers, sizes, strict=True)
        self.changes += [(storage_number, -size) for storage_number, size in zip(numbers, sizes, strict=True)]
        self.peak += sum(sizes)

    def _write(self, event: _Event) -> None:
        self._end_row()
        self._events.append(event)

    def taken_memory(self) -> MemoryEvents:
        """Return allocations and frees since the last program or the last call."""
        events = tuple(self.changes)
        self.changes.clear()
        return events

    @contextmanager
    def program(self, ledger: Ledger) -> Iterator[Callable[[], Program]]:
        """Record the operations inside of the context. The yielded function returns the Program afterwards."""
        # Peak and kept bytes are relative to the bytes alive now, which belong to earlier tasks.
        before = self.live
        self._events, self.peak, self._ledger, self._dropped = [], before, ledger, None
        self._row, self._fused = _Row(), set()
        ledger.traffic.clear()
        self.changes.clear()

        def make() -> Program:
            self._end_row()
            traffic = {key: entry.scaled(1) for key, entry in ledger.traffic.items()}
            kept_bytes, peak = self.live - before, self.peak - before
            return Program(tuple(self._events), kept_bytes, peak, traffic, memory=self.taken_memory())

        with self:
            yield make


@dataclass(slots=True)
class _Row:
    """Consecutive element kernels in one fusion, with the bytes made, read and changed by storage."""

    kernels: list[Kernel] = field(default_factory=list)
    _made: dict[int, int] = field(default_factory=dict)
    _read: dict[tuple[int, int], int] = field(default_factory=dict)
    """By storage and offset: slices of a product's result are read one by one."""
    _changed: dict[int, int] = field(default_factory=dict)

    def add(self, kernel: Kernel, read: dict[tuple[int, int], int], written: dict[int, int]) -> None:
        """Add a kernel. `read`: bytes by storage and offset; `written`: by storage."""
        self.kernels.append(kernel)
        for region, size in read.items():
            if region[0] not in self._made:
                self._read[region] = max(size, self._read.get(region, 0))
        reads = {storage_id for storage_id, _ in read}
        for storage_id, size in written.items():
            # A storage from before the fusion is changed in place: its bytes are written even if it is freed.
            target = self._changed if storage_id in reads and storage_id not in self._made else self._made
            target[storage_id] = size

    def fused(self, alive: Collection[int]) -> Kernel:
        """Return all kernels as one. `alive`: the storages not yet freed."""
        written = sum(size for storage_id, size in self._made.items() if storage_id in alive)
        touched = sum(self._read.values()) + sum(self._changed.values()) + written
        special = any(kernel.kind in ("special", "random") for kernel in self.kernels)
        most = max(self.kernels, key=lambda kernel: kernel.elements)
        kernel_kind: KernelKind = "special" if special else "element"
        name = COMPILED if len(self.kernels) > 1 else most.operation
        return Kernel(kernel_kind, 0.0, touched, most.elements, most.dtype, times=most.times, operation=name)


class _Facts(NamedTuple):
    """An operation's facts."""

    name: str
    mutates: bool
    """Whether it changes an argument."""
    overwrites: bool
    """Whether it is an out= overload, which only writes the last arguments."""
    is_view: bool


_FACTS: dict[int, _Facts] = {}


def _facts(op: Any) -> _Facts:
    # Operations are permanent objects, so ids are keys: a search records millions of calls, and an operation's hash is
    # Python code.
    known = _FACTS.get(id(op))
    if known is None:
        schema = op._schema
        name = schema.name.removeprefix("aten::")
        overwrites = bool(_OUT.fullmatch(schema.overload_name))
        known = _FACTS[id(op)] = _Facts(name, schema.is_mutable, overwrites, name in VIEWS)
    return known


_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _kernel(
    op: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor], results: list[Tensor]
) -> Kernel:  # fmt: skip
    """Return the kernel of an operation: its kind, its floating-point operations, the bytes read and written."""
    if name == "copy_" and _size_bytes(given[-1]) == given[-1].element_size():
        name = "fill_"  # tensors with values are filled with one number
    if name in LOOKUPS:  # reads only the copied rows of a table
        moved = [*given[1:], *results, *results]
    elif name in UPDATES:  # reads and writes the rows of the last argument
        moved = [*given[1:], *given[-1:], *given[-1:]]
    else:
        moved = [x for index, x in enumerate(given) if index != UNREAD.get(name, 0 if name in WRITES else None)]
        moved += results
    touched = sum(_size_bytes(x) for x in moved)
    largest = max((x.numel() for x in moved), default=0)
    dtype = _DTYPES.get((results or given)[0].dtype, "float32") if results or given else "float32"
    if name == "_scaled_mm":
        dtype = "fp8"
    flops, side, members = _products(name, args, kwargs, results)
    if name in NORMS or name in SOFTMAXES:
        side = float(results[0].shape[-1])
    if name in ATTENTIONS:
        # A fused causal attention leaves out the tiles above the diagonal, half of its products.
        causal = [argument.name for argument in op._schema.arguments].index("is_causal")
        if causal < len(args) and args[causal]:  # trailing defaults are absent; is_causal's is False
            flops /= 2
    fresh = name.removesuffix("_")  # the same function in place has the same kernel
    kernel_kind: KernelKind = "cast" if results and results[0].dtype == torch.float8_e4m3fn else "element"
    if name in _PRODUCTS or name in CONVOLUTIONS:
        kernel_kind = "product"
    elif name in ATTENTIONS or name in WINDOWED:
        kernel_kind = "attention"
    elif name in NORMS:
        kernel_kind = NORMS[name]
    elif fresh in SPECIAL:
        kernel_kind = "special"
    elif fresh in RANDOM:
        kernel_kind = "random"
    elif kernel_kind == "element" and results and name not in SCATTERED | JOINS:
        kernel_kind = _element_kind(given, results[0])
    return Kernel(kernel_kind, flops, touched, largest, dtype, side, members=members, operation=name)


def _element_kind(given: Sequence[Tensor], result: Tensor) -> ElementKind:
    """Return the kind of torch's GPU kernel for a function of elements (aten/src/ATen/native/cuda/Loops.cuh).

    Returns:
        sum: Rows are added. mixed: Inputs and result differ in dtype. strided: As mixed, and an input of several
            elements
        is repeated or not contiguous. element: None of these.
    """
    several = [x for x in given if x.numel() > 1 and x.is_floating_point()]  # masks are not cast
    if any(x.numel() > result.numel() for x in several):
        # A sum of each row reads memory in order, at the memory's pace.
        return "sum" if result.dim() and several[0].shape[-1] == result.shape[-1] > 1 else "element"
    if all(x.dtype == result.dtype for x in several):
        return "element"
    return "mixed" if all(x.numel() == result.numel() and x.is_contiguous() for x in several) else "strided"


def _products(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Sequence[Tensor]
) -> tuple[float, float, int]:  # fmt: skip
    """Return floating-point operations, the cube root of a product's three sizes, and the number of products in a
    batch."""
    if name == _GROUPED:
        # [R, K] x [n, K, N], rows cut by expert; or [K, R] x [R, N], a gradient of the weights, sums cut by expert.
        (x, weight), members = args[:2], len(args[2])
        products = x.numel() * weight.shape[-1]
        return 2.0 * products, (products / members) ** (1 / 3), members
    if name in _PRODUCTS:
        first = _PRODUCTS[name]
        *batch, rows, inner = args[first].shape
        columns = args[first + 1].shape[-1]
        members = math.prod(batch)
        return 2.0 * members * rows * inner * columns, float(rows * inner * columns) ** (1 / 3), members
    if name in ATTENTIONS:
        # Forward Q K' and P V; backward recomputes the scores and makes dQ, dK, dV and dP: five products for two.
        first, times = ATTENTIONS[name]
        query, key = args[first], args[first + 1]
        batch, heads, rows, width = query.shape
        side = float(rows * width * key.shape[2]) ** (1 / 3)
        return times * 4.0 * batch * heads * rows * key.shape[2] * width, side, 1
    if name in WINDOWED:
        # [B T, A, E] with the places where rows end: a token attends to the last `window` keys of its row.
        first, longest, times = WINDOWED[name]
        (tokens, heads, width), length = args[first].shape, args[longest]
        window = min(length, kwargs["window_size_left"] + 1)
        keys = window - window * (window - 1) / (2 * length)  # a token's, in the mean
        return times * 4.0 * tokens * heads * keys * width, float(length * width * window) ** (1 / 3), 1
    if name in CONVOLUTIONS:
        # As matrix products over patches: [B x positions, channels a group x kernel] times [.., channels out].
        # Positions are the result's, or a transposed convolution's input's. Backward: one product a wanted gradient.
        begin = CONVOLUTIONS[name] - 1
        x, weight, transposed, groups = args[begin], args[begin + 1], args[begin + 6], args[begin + 8]
        made = x if transposed else args[0] if begin else results[0]
        times = sum(args[10][:2]) if begin else 1
        rows, inner = made.shape[0] * math.prod(made.shape[2:]), math.prod(weight.shape[1:])
        side = float(rows * inner * (weight.shape[0] // groups)) ** (1 / 3)
        return times * 2.0 * rows * inner * weight.shape[0], side, 1
    return 0.0, 0.0, 1


def _size_bytes(x: Tensor) -> int:
    """Return a tensor's bytes, at most the bytes of its storage (an expanded tensor)."""
    return min(x.nbytes, x.untyped_storage().nbytes())


def between(small: float, large: float, share: float) -> float:
    """Interpolate at `share` of the way from the small microbatch's figure to the large one's, or extrapolate."""
    return max(0.0, small + share * (large - small))  # extrapolation below the small one may be negative


def interpolated_program(small: Program, large: Program, share: float) -> Program:
    """Return the program at `share` of the way from the small one to the large one, or beyond; empty if the events
    differ.

    Two recordings give a task's program for a microbatch of any size: operations are equal, and flops, bytes, elements
    and payload are linear in the number of samples. This does not hold for operations on pieces of samples: a larger
    size has more pieces, and the last piece is a remainder. A product's side grows as the cube root of its flops.
    """
    if len(small.events) != len(large.events):
        return Program()
    events = []
    for small_event, large_event in zip(small.events, large.events, strict=True):
        event = _interpolated_event(small_event, large_event, share)
        if event is None:
            return Program()
        events.append(event)
    return Program(tuple(events))


def _interpolated_event(small: _Event, large: _Event, share: float) -> _Event | None:
    """Interpolate an event; None for events of two kinds."""

    if type(small) is not type(large):
        return None
    if isinstance(small, Kernel) and isinstance(large, Kernel):
        if (small.kind, small.dtype, small.times) != (large.kind, large.dtype, large.times):
            return None
        return small._replace(
            flops=between(small.flops, large.flops, share),
            touched_bytes=round(between(small.touched_bytes, large.touched_bytes, share)),
            elements=round(between(small.elements, large.elements, share)),
            # mnk grows in proportion to samples, its cube root does not.
            side=between(small.side**3, large.side**3, share) ** (1 / 3),
            members=round(between(small.members, large.members, share)),
        )
    if isinstance(small, Start) and isinstance(large, Start):
        if (small.axes, small.verb, small.times) != (large.axes, large.verb, large.times):
            return None
        # Verb and comm depend on the layout; only payload bytes grow with samples.
        return small._replace(payload_bytes=round(between(small.payload_bytes, large.payload_bytes, share)))
    return small
