"""The norm of the whole gradient. Each element is counted once, by the copies and parts that each slot declares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Slot
from meshwright.compute.parameters.fixed import SQUARE_DIGITS, FixedPoint, exact_squares, joined_squares
from meshwright.ranks.grid import DATA_AXES, ENDS, HEAD_COPIES, PIPE
from meshwright.ranks.mesh import Mesh

PIECE = 2**16
"""Elements of a gradient that torch copies to float64 at a time on a CPU, into a core's cache. The norm of 2^24
elements took 170 ms whole, 12.9 ms in pieces of 2^20 elements and 7.5 ms in these (in float32 2.4 ms, 7e-4 off)."""


def gradient_norm(slots: Sequence[Slot], mesh: Mesh) -> Tensor:
    """Return the 2-norm over all parameters, a float64 scalar, equal on every rank.

    Sends one all-reduce of 8 bytes for each set of axes over which slots hold different parts, and one over stages.
    """
    return norm_of_squares(slots, dict(enumerate(squares_of(slots, mesh))), mesh)


def sharing_axes(slot: Slot, fixed: FixedPoint | None) -> tuple[str, ...]:
    """Return the axes of data and contexts whose ranks share out a slot's squares: each has the whole gradient, and
    digits have no order."""
    return () if fixed is None else tuple(axis for axis in slot.copy_axes if axis in (*DATA_AXES, "context"))


def squares_of(slots: Sequence[Slot], mesh: Mesh, fixed: FixedPoint | None = None) -> tuple[Tensor, ...]:
    """Return the sum of squares of each slot's gradient on this rank, float64 scalars; one launch for all on a GPU.

    `fixed`: sums of digits, equal in any order (parameters/fixed.py), of this rank's share (`sharing_axes`). Always in
    float64: a float32 sum of 2^24 squares is 7e-4 off on a CPU, since a square below the sum's last bit is lost.
    Layouts would then clip differently.
    """
    gradients = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
    assert len(gradients) == len(slots), "a slot without a gradient"
    if fixed is not None:
        digits = []
        for slot, gradient in zip(slots, gradients, strict=True):
            axes = sharing_axes(slot, fixed)
            ranks, rank = mesh.size(*axes), mesh.index(*axes)
            share = slice(len(gradient) * rank // ranks, len(gradient) * (rank + 1) // ranks)
            digits.append(exact_squares(gradient[share], fixed.scale))
        return tuple(digits)
    if gradients and gradients[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square_().unbind()
    squares = []
    room = torch.empty(min(PIECE, max((len(x) for x in gradients), default=0)), dtype=torch.float64)
    for gradient in gradients:
        if gradient.device.type != "cpu" or gradient.dtype == torch.float64:
            squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
            continue
        pieces = (room[: piece.numel()].copy_(piece) for piece in gradient.split(PIECE))
        squares.append(torch.stack([torch.dot(piece, piece) for piece in pieces]).sum())
    return tuple(squares)


def norm_of_squares(
    slots: Sequence[Slot], squares: Mapping[int, Tensor], mesh: Mesh, fixed: FixedPoint | None = None
) -> Tensor:
    """Return the norm, given `squares_of` by slot index.

    `fixed`: the norm is NaN if an addend of a gradient was too large for the fixed-point sum on any rank. All ranks
    send 8 bytes more for this check.
    """
    by_axes: defaultdict[tuple[tuple[str, ...], tuple[str, ...]], list[Tensor]] = defaultdict(list)
    for index, slot in enumerate(slots):
        if slot.rule.by == "signs":
            continue  # the gradient of a router's bias counts tokens
        # A table on both pipeline ends, or a head with copies, counts on the first rank that holds a copy.
        if all(mesh.index(axis) == 0 for axis in slot.shared if axis not in slot.part_axes):
            parted = (axis for axis in slot.part_axes if axis not in (HEAD_COPIES, ENDS, PIPE))
            by_axes[mesh.grid.ordered(parted), sharing_axes(slot, fixed)].append(squares[index])
    digits = () if fixed is None else (len(SQUARE_DIGITS[fixed.dtype]),)
    total = torch.zeros(digits, dtype=torch.float64, device=mesh.device)
    # Sorted, so that all ranks call the same all-reduces in the same order.
    for both, parts in sorted(by_axes.items(), key=lambda group: group[0]):
        group_sum = torch.stack(parts).sum(0)
        for axes in filter(None, both):
            mesh.comm(*axes).all_reduce(group_sum)
        total += group_sum
    # Stages hold different parameters, or parts of the head's table.
    if PIPE in mesh.grid.names:
        mesh.comm(PIPE).all_reduce(total)
    if fixed is None:
        return total.sqrt()
    spoiled = fixed.spoiled.to(torch.float64)
    mesh.world.all_reduce(spoiled)
    return joined_squares(total, fixed.scale).sqrt().where(spoiled == 0, torch.nan)
