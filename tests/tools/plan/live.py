"""The bytes of a rank's tensors that are alive, followed from operator to operator.

A storage counts from the operator that made it until its last user lets it go. What operators allocate inside of
themselves is not seen; nor what other threads allocate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`live`: bytes of what was made since it was entered and is still there; `peak`: the most that ever was.

    What an operator reads and nobody has seen made was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for x in _tensors((args, kwargs)):
            self._note(x, 0)
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            self._note(x, x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, x: Tensor, size_bytes: int) -> None:
        storage = x.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return

        def gone(_: object) -> None:
            del self._seen[key]
            self.live -= size_bytes

        self._seen[key] = weakref.ref(storage, gone)
        self.live += size_bytes


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
