"""Activation checkpointing: keep the inputs of groups of layers, and recompute activations in the backward pass.

Chen et al., arXiv 1604.06174, by torch's checkpoint, which restores the random numbers of the first pass, so that
dropout masks are equal. In a stage of l of the network's N layers, groups of a layers keep about l/a inputs and the
activations of a layers. The sum is least for a near √N (AxoNN, arXiv 2110.13005, section 4.2). Groups of one layer held
half of these groups' peak in our measurements, in the same time (docs/memory.md).

GELU alone is never recomputed: the next linear keeps its output anyway. `LiveBytes` counts live activation bytes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright.compute.model import Run
from meshwright.ranks.mesh import Mesh

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)
"""Products of matrices, the last one in FP8."""


class _Keeping(TorchDispatchMode):
    """A mode that keeps the results of attention kernels and of every second product of the first pass.

    The second pass returns these instead of computing (selective checkpointing by operation, as in torchtitan). torch's
    create_selective_checkpoint_contexts counts every operation of both passes, and fails if ranks are threads: the last
    thread to arrive runs a collective's operations for all.
    """

    def __init__(self, results: deque[Any], *, again: bool) -> None:
        super().__init__()
        self._kept, self._again, self._products = results, again, 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = op._schema.name.removeprefix("aten::")
        product = op in PRODUCTS
        self._products += product
        if not (name.startswith("_scaled_dot_product_") or (product and self._products % 2)):
            return op(*args, **(kwargs or {}))
        if self._again:
            return self._kept.popleft()
        result = op(*args, **(kwargs or {}))
        # A new tensor on the same memory: the original is part of the first pass's autograd graph.
        self._kept.append(tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result))
        return result


def recomputing(mesh: Mesh) -> Run:
    """Make a run that keeps only the arguments; the backward pass computes the function again."""
    # In a plan no numbers are drawn, and none can differ.
    settings: dict[str, Any] = (
        {"preserve_rng_state": False, "determinism_check": "none"} if mesh.device.type == "meta" else {}
    )

    def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
        # torch advises against the reentrant form, which also needs an argument that requires a gradient.
        return checkpoint(function, *arguments, use_reentrant=False, **settings)

    return recomputed


def keeping_operations(mesh: Mesh) -> Run:
    """Make a run that keeps the results of some operations (`_Keeping`) in addition to the arguments."""
    return recomputed_in_part


def recomputed_in_part(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments); the backward pass computes all but some operations again."""
    results: deque[Any] = deque()
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (_Keeping(results, again=False), _Keeping(results, again=True)),
    )


class LiveBytes(TorchDispatchMode):
    """A counter of the bytes of live tensors after each operation, on meta and real devices.

    A storage counts from its allocation by an operation until the last tensor on the storage is deleted. Workspaces
    inside of operations and allocations of other threads are not counted. `live`: bytes allocated while entered and
    still alive; `peak`: the maximum of `live`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._number = 0
        self.changes: list[tuple[int, int]] = []
        """Storages by number in the order of allocation (bytes > 0) and of freeing (< 0)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap each operation to keep its compiler out; nothing here is compiled.
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # In a backward pass a TorchFunctionMode (on_device.py) would intercept each attribute access below.
        with torch._C.DisableTorchFunction():
            result = op(*args, **(kwargs or {}))
            self.follow([*tensors_in(args), *(tensors_in(kwargs.values()) if kwargs else ())], result)
        return result

    def follow(self, given: list[Tensor], result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Count an operation's allocations: its results, except views of the tensors `given`. Return results and new
        tensors."""
        results = [result] if isinstance(result, Tensor) else list(tensors_in((result,)))
        # By storage, not by tensor: views and in-place results allocate nothing.
        there = {x.untyped_storage()._cdata for x in given}
        new = [x for x in results if x.untyped_storage()._cdata not in there]
        for x in new:
            self._follow(x)
        return results, new

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        # Two results may share one storage.
        if address in self._storages:
            return
        self.live += size
        self.peak = max(self.peak, self.live)
        # Addresses are reused after a free; numbers are not.
        self._number += 1
        storage_index = self._number
        self.changes.append((storage_index, size))

        def gone(_: object) -> None:
            del self._storages[address]
            self.live -= size
            self.changes.append((storage_index, -size))

        # A weak reference: a strong one would keep the storage alive.
        self._storages[address] = storage_index, weakref.ref(storage, gone)

    def number_of(self, x: Tensor) -> int:
        """Return the number of a tensor's storage; for a storage allocated before, its negative address."""
        address: int = x.untyped_storage()._cdata
        return self._storages[address][0] if address in self._storages else -address


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also inside of lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
