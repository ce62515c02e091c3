"""The bytes of tensors that are alive, followed from operation to operation, on meta tensors as on real ones.

A storage counts from the operation that makes it until the last tensor on it is gone. What operations allocate inside
of themselves is not seen, nor what other threads allocate.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`live`: bytes of what was made while this was entered and is still there; `peak`: the most that ever was."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        given = [*tensors_in(args), *tensors_in(kwargs.values() if kwargs else ())]
        results = list(tensors_in((result,)))
        there = {x.untyped_storage()._cdata for x in given}
        new = [x for x in results if x.untyped_storage()._cdata not in there]
        for x in new:
            self._follow(x)
        self.note(op, args, given, results, new)
        return result

    def note(
        self, op: Any, args: tuple[Any, ...], given: list[Tensor], results: list[Tensor], new: list[Tensor]
    ) -> None:
        """For subclasses that write operations down. `new`: the results that are no views of what was given."""

    def _follow(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._storages:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: object) -> None:
            del self._storages[address]
            self.live -= size

        self._storages[address] = weakref.ref(storage, gone)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
