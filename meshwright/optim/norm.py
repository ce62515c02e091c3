"""The norm of the whole gradient, each element counted once, from what the slots say they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.bucket import Slot
from meshwright.grid import ENDS, PIPE
from meshwright.mesh import Mesh

PIECE = 2**18
"""Elements of a half-precision gradient that are widened at once: on a CPU, torch makes a copy of them."""


def gradient_norm(slots: Sequence[Slot], mesh: Mesh) -> Tensor:
    """The 2-norm over all parameters, a float64 scalar; the same on every rank.

    Sends one all-reduce of 8 bytes for each set of axes over which slots hold different parts, and one over stages.
    """
    return norm_of_squares(slots, {index: square_of(slot) for index, slot in enumerate(slots)}, mesh)


def square_of(slot: Slot) -> Tensor:
    """The sum of the squares of what this rank holds of a slot's gradient, a float64 scalar.

    Of half precision it is summed in float64: then the size of the buckets does not show in what is clipped.
    """
    gradient = slot.parameter.grad
    assert gradient is not None, "a slot without a gradient"
    if gradient.element_size() >= 4:
        return torch.linalg.vector_norm(gradient).double().square()
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in gradient.split(PIECE)]
    return torch.stack(norms).square().sum()


def norm_of_squares(slots: Sequence[Slot], squares: Mapping[int, Tensor], mesh: Mesh) -> Tensor:
    """The norm from each slot's `square_of`, by the slot's index."""
    by_axes: defaultdict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for index, slot in enumerate(slots):
        if _counts(slot, mesh):
            by_axes[mesh.grid.ordered(axis for axis in slot.part_axes if axis != ENDS)].append(squares[index])
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes, parts in sorted(by_axes.items()):
        part = torch.stack(parts).sum()
        if axes:
            mesh.comm(*axes).all_reduce(part)
        total += part
    if PIPE in mesh.grid.names:
        mesh.comm(PIPE).all_reduce(total)
    return total.sqrt()


def _counts(slot: Slot, mesh: Mesh) -> bool:
    """A slot of which both ends of the pipeline hold the same part counts on the first stage."""
    twice = slot.tied and ENDS not in slot.part_axes and PIPE in mesh.grid.names
    return not twice or mesh.index(PIPE) == 0
