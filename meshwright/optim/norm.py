"""The norm of the whole gradient, each element counted once, from what the slots say they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.bucket import Slot
from meshwright.mesh import Mesh


def gradient_norm(slots: Sequence[Slot], mesh: Mesh) -> Tensor:
    """The 2-norm over all parameters, a float64 scalar; the same on every rank.

    Sends one all-reduce of 8 bytes for each set of axes over which slots hold different parts.
    """
    squares: defaultdict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for slot in slots:
        assert slot.parameter.grad is not None, "a slot without a gradient"
        norm = torch.linalg.vector_norm(
            slot.parameter.grad, dtype=torch.promote_types(slot.parameter.dtype, torch.float32)
        )
        squares[mesh.grid.ordered(slot.part_axes)].append(norm.double().square())
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes, parts in sorted(squares.items()):
        part = torch.stack(parts).sum()
        if axes:
            mesh.comm(*axes).all_reduce(part)
        total += part
    return total.sqrt()
