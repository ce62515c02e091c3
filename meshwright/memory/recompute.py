"""Activation checkpointing: keep the inputs of groups of layers, and recompute activations in the backward pass.

Chen et al., arXiv 1604.06174, by torch's checkpoint, which restores the random numbers of the first pass, so that
dropout masks are equal. In a stage of l of the network's N layers, groups of a layers keep about l/a inputs and the
activations of a layers, least for a near √N (AxoNN, arXiv 2110.13005, section 4.2). Groups of one layer held half of
these groups' peak in our measurements, in the same time (docs/memory.md).

GELU alone is never recomputed: the next linear keeps its output anyway. `LiveBytes` counts live activation bytes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from meshwright.model import Chunk, Run, at_once

if TYPE_CHECKING:
    from meshwright.config import Config


class RunsGroups(Protocol):
    """A chain whose attention cores and groups of layers a backward pass may run again."""

    def run_attention_by(self, run: Run) -> None: ...

    def run_in_groups(self, groups: Sequence[Sequence[int]], run: Run = at_once, *, keeps_rows: bool = False) -> None:
        """Run each group of layers by run(function, *arguments)."""


def apply(config: Config, model: RunsGroups, chunks: Sequence[Chunk]) -> None:
    """Let a model recompute groups of its layers, or its attention cores (memory.recompute). `chunks`: the model's."""
    setting = config.memory.recompute
    if setting == "none":
        return
    if setting == "selective":
        model.run_attention_by(recomputed)
        return
    groups = [
        group for chunk in chunks for group in groups_of(chunk.layers, recomputed_group(config, len(chunk.layers)))
    ]
    run = partial(recomputed, keeps=True) if setting == "ops" else recomputed
    model.run_in_groups(groups, run, keeps_rows=config.layout.data.in_pieces)


def recomputed_group(config: Config, stage_layers: int) -> int:
    """Return the number of layers recomputed together in a chunk of `stage_layers`."""
    setting = config.memory.recompute
    assert setting not in ("none", "selective"), f"memory.recompute={setting} has no groups"
    if setting == "ops" or config.layout.data.in_pieces:
        return 1
    return best_group(stage_layers, config.model.num_blocks) if setting == "auto" else int(setting)


class _Keeping(TorchDispatchMode):
    """Keeps the results of attention kernels and of every second product in the first pass, for the second pass to
    return instead of computing them (selective checkpointing by operation, as in torchtitan).

    torch's create_selective_checkpoint_contexts counts every operation of both passes, and fails where ranks are
    threads: the last thread to arrive does a collective's operations for all.
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
        # A new tensor on the same memory: the original is part of the first pass's autograd graph.
        self._kept.append(tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result))
        return result


def recomputed(function: Callable[..., Any], *arguments: Any, keeps: bool = False) -> Any:
    """function(*arguments); keeps only the arguments for the backward pass. `keeps`: the results of some operations,
    too (`_Keeping`)."""
    # torch advises against the reentrant form, which also needs an argument that requires a gradient.
    if not keeps:
        return checkpoint(function, *arguments, use_reentrant=False)
    kept: deque[Any] = deque()
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (_Keeping(kept, again=False), _Keeping(kept, again=True)),
    )


def groups_of(layers: Sequence[int], every: int) -> tuple[Sequence[int], ...]:
    """The layers in groups of `every`; the last group may be shorter."""
    return tuple(layers[start : start + every] for start in range(0, len(layers), every))


def best_group(stage_layers: int, network_layers: int) -> int:
    """The divisor of a stage's layers nearest to √(the network's layers); the smaller of two as near."""
    # Divisors only: the paper's formula assumes groups of equal length.
    factors = [size for size in range(1, stage_layers + 1) if stage_layers % size == 0]
    return min(factors, key=lambda size: abs(size - math.sqrt(network_layers)), default=1)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors after each operation, on meta and real devices alike.

    A storage counts from the operation that allocates it until its last tensor is deleted. Workspaces inside of
    operations and allocations of other threads are not seen. `live`: bytes allocated while entered and still alive;
    `peak`: the maximum of `live`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._number = 0
        self.changes: list[tuple[int, int]] = []
        """Storages by number in the order in which they were allocated (bytes > 0) or freed (< 0)."""

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
        """Count what an operation has allocated: its results, and those that are no views of the tensors `given`."""
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
        number = self._number
        self.changes.append((number, size))

        def gone(_: object) -> None:
            del self._storages[address]
            self.live -= size
            self.changes.append((number, -size))

        # A weak reference: a strong one would keep the storage alive.
        self._storages[address] = number, weakref.ref(storage, gone)

    def number_of(self, x: Tensor) -> int:
        """The number of a tensor's storage; for a storage allocated before, its negative address."""
        address: int = x.untyped_storage()._cdata
        return self._storages[address][0] if address in self._storages else -address


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, also inside of lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
