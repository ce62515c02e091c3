"""The norm of the whole gradient, each element counted once, from the slots' own account of what they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.bits.fixed import SQUARE_DIGITS, FixedPoint, exact_squares, joined_squares
from meshwright.parameters.bucket import Slot
from meshwright.ranks.grid import ENDS, HEAD_COPIES, PIPE
from meshwright.ranks.mesh import Mesh

PIECE = 2**20
"""Elements of a gradient that are widened at once on a CPU, where torch makes a float64 copy of what it sums: 2^24 of
them took 170 ms whole, 11.5 ms in pieces (in float32 2.4 ms, and 7e-4 off)."""


def gradient_norm(slots: Sequence[Slot], mesh: Mesh) -> Tensor:
    """The 2-norm over all parameters, a float64 scalar; the same on every rank.

    Sends one all-reduce of 8 bytes for each set of axes over which slots hold different parts, and one over stages.
    """
    return norm_of_squares(slots, dict(enumerate(squares_of(slots))), mesh)


def squares_of(slots: Sequence[Slot], fixed: FixedPoint | None = None) -> tuple[Tensor, ...]:
    """The sum of the squares of what this rank holds of each slot's gradient, float64 scalars. A GPU gets one launch.
    `fixed`: by digits, whose sums have no order (bits/fixed.py).

    It is summed in float64 whatever the gradient's precision. A float32 sum of many squares stops growing where a
    square is less than its last bit: on CPUs torch's is 7e-4 off at 2^24 elements, so buckets and layouts would
    decide what is clipped.
    """
    gradients = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
    assert len(gradients) == len(slots), "a slot without a gradient"
    if fixed is not None:
        return tuple(exact_squares(gradient, fixed.scale) for gradient in gradients)
    if gradients and gradients[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square_().unbind()
    squares = []
    for gradient in gradients:
        # torch's CPU kernel makes a float64 copy of what it widens: by pieces the copy is small (PIECE).
        copies = gradient.device.type == "cpu" and gradient.dtype != torch.float64
        pieces = gradient.split(PIECE) if copies else (gradient,)
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
        squares.append(torch.stack(norms).square().sum())
    return tuple(squares)


def norm_of_squares(
    slots: Sequence[Slot], squares: Mapping[int, Tensor], mesh: Mesh, fixed: FixedPoint | None = None
) -> Tensor:
    """The norm from each slot's part of `squares_of`, by the slot's index. `fixed`: it is not finite where an addend of
    a gradient was too large for its sum, on whichever rank, which 8 bytes more in the world tell."""
    by_axes: defaultdict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for index, slot in enumerate(slots):
        if slot.nudged:
            continue  # its gradient counts tokens
        # What both ends of the pipeline, or all ranks with a copy of a head, hold alike counts on the first of them.
        if all(mesh.index(axis) == 0 for axis in slot.shared if axis not in slot.part_axes):
            parted = (axis for axis in slot.part_axes if axis not in (HEAD_COPIES, ENDS, PIPE))
            by_axes[mesh.grid.ordered(parted)].append(squares[index])
    digits = () if fixed is None else (len(SQUARE_DIGITS),)
    total = torch.zeros(digits, dtype=torch.float64, device=mesh.device)
    # Sorted: all ranks call the same sums in the same order, whatever order their slots have.
    for axes, parts in sorted(by_axes.items()):
        part = torch.stack(parts).sum(0)
        if axes:
            mesh.comm(*axes).all_reduce(part)
        total += part
    # Stages hold different parameters, or parts of the head's table; one sum adds them all up.
    if PIPE in mesh.grid.names:
        mesh.comm(PIPE).all_reduce(total)
    if fixed is None:
        return total.sqrt()
    spoiled = fixed.spoiled.to(torch.float64)
    mesh.world.all_reduce(spoiled)
    return joined_squares(total, fixed.scale).sqrt().where(spoiled == 0, torch.nan)
