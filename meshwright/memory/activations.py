"""How much a forward pass keeps for its backward pass, counted on tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def kept_bytes(forward: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of the tensors that autograd keeps of a forward pass. Views of one memory count once, parameters do not.

    What torch.utils.checkpoint keeps by itself, the arguments of a recomputed function, is not seen.
    """
    held = {parameter.untyped_storage()._cdata for parameter in parameters}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed memory's address may come again

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in held:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(sizes.values())
