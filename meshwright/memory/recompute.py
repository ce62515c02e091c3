"""Activation checkpointing: keep what groups of layers read, and compute what is between again in the backward pass.

Chen et al., arXiv 1604.06174. torch's own checkpoint, which gives the second pass the random numbers of the first, so
that dropout masks are the same. In a stage of l of the network's N layers, groups of a cost about l/a inputs and the
activations of a layers: least where a is near √N (AxoNN, arXiv 2110.13005, section 4.2).

`LiveBytes` follows what a forward pass keeps, and what is left of it at any time.

Not everything is worth it: GELU alone is never recomputed, since the next linear keeps its output anyway. Groups of one
layer held half as much at the peak as the paper's in our measurements, at no more time (docs/memory.md).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), of which only the arguments are kept."""
    # torch advises against its reentrant form, which also asks that some argument requires a gradient.
    return checkpoint(function, *arguments, use_reentrant=False)


class _Keeping(TorchDispatchMode):
    """The results of some operations of a first pass, and the second pass that takes them instead of computing again:
    attention's kernels, and every second product (torchtitan's selective checkpointing by operation).

    torch's own (create_selective_checkpoint_contexts) counts every operation of both passes, and fails where ranks are
    threads, of which the last to come does a collective's work for all.
    """

    def __init__(self, kept: deque[Any], *, again: bool) -> None:
        super().__init__()
        self._kept, self._again, self._products = kept, again, 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = op._schema.name.removeprefix("aten::")
        product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self._products += product
        if not (name.startswith("_scaled_dot_product_") or (product and self._products % 2)):
            return op(*args, **(kwargs or {}))
        if self._again:
            return self._kept.popleft()
        result = op(*args, **(kwargs or {}))
        # Another tensor on the same memory: the graph of the first pass hangs on the one that is given.
        self._kept.append(tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result))
        return result


def recomputed_but_kept(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), of which the arguments and the results of some operations (`_Keeping`) are kept."""
    kept: deque[Any] = deque()
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (_Keeping(kept, again=False), _Keeping(kept, again=True)),
    )


def groups_of(layers: Sequence[int], every: int) -> tuple[Sequence[int], ...]:
    """The layers in groups of `every`; the last one takes what is left."""
    return tuple(layers[start : start + every] for start in range(0, len(layers), every))


def best_group(stage_layers: int, network_layers: int) -> int:
    """The factor of a stage's layers nearest to the square root of the network's; of two as near, the smaller."""
    # Factors alone: the paper's formula is of groups of equal length.
    factors = [size for size in range(1, stage_layers + 1) if stage_layers % size == 0]
    return min(factors, key=lambda size: abs(size - math.sqrt(network_layers)), default=1)


class LiveBytes(TorchDispatchMode):
    """The bytes of tensors that are alive, followed from operation to operation, on meta tensors as on real ones.

    A storage counts from the operation that makes it until the last tensor on it is gone. What operations allocate
    inside of themselves is not seen, nor what other threads allocate. `live`: bytes of what was made while this was
    entered and is still there; `peak`: the most that ever was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._number = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch wraps around each operation, so that its compiler keeps out: nobody compiles what is followed.
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # In a backward pass a mode of functions (on_device.py) would be asked of each look at a tensor here.
        with torch._C.DisableTorchFunction():
            given = [*tensors_in(args), *(tensors_in(kwargs.values()) if kwargs else ())]
            result, known = self.result_of(op, args, kwargs or {}, given)
            results = [result] if isinstance(result, Tensor) else list(tensors_in((result,)))
            # By storage, not by tensor: a view allocates nothing, and an operation in place gives back what it was
            # given.
            there = {x.untyped_storage()._cdata for x in given}
            new = [x for x in results if x.untyped_storage()._cdata not in there]
            for x in new:
                self._follow(x)
            self.note(op, args, known, given, results, new)
        return result

    def result_of(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor]
    ) -> tuple[Any, Any]:
        """op(*args, **kwargs), for subclasses that know it already, and what they know of it. `given`: the tensors
        among its arguments."""
        return op(*args, **kwargs), None

    def note(
        self, op: Any, args: tuple[Any, ...], known: Any, given: list[Tensor], results: list[Tensor], new: list[Tensor]
    ) -> None:
        """For subclasses that write operations down. `known`: of `result_of`; `new`: the results that are no views of
        what was given."""

    def changed(self, number: int, size: int) -> None:
        """For subclasses that write memory down: the storage of that number has come, with so many bytes, or has gone,
        with so many less than none."""

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        # Two results may share one storage.
        if address in self._storages:
            return
        self.live += size
        self.peak = max(self.peak, self.live)
        # Addresses are used again once a storage is gone; numbers are not.
        self._number += 1
        number = self._number
        self.changed(number, size)

        def gone(_: object) -> None:
            del self._storages[address]
            self.live -= size
            self.changed(number, -size)

        # Weak, so that following a tensor does not keep it: its end is what is looked for.
        self._storages[address] = number, weakref.ref(storage, gone)

    def number_of(self, x: Tensor) -> int:
        """The number of a tensor's storage; of one that was not made here its address, less than nothing."""
        address: int = x.untyped_storage()._cdata
        return self._storages[address][0] if address in self._storages else -address


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
