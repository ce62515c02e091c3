"""Rotary positions (Su et al., arXiv 2104.09864): pairs of a head's numbers are turned by angles that grow with the
token's position, so that scores depend on distances.

    y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin        x1, x2 [..., E/2]: the halves of a head
    dx1 = dy1 cos + dy2 sin,  dx2 = dy2 cos - dy1 sin

Angles, cosines and sines are float32 whatever the run's precision, as in transformers: element by element the same bits
for the same position, whichever rank holds it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.model import to_device
from meshwright.compute.models.rotary_section import LinearRope, Llama3Rope, PlainRope, YarnRope


class Rotation(NamedTuple):
    """Cosines and sines of tokens' angles, float32, [T, E/2], or [B, T, E/2] where rows have positions of their own."""

    cosines: Tensor
    sines: Tensor


def rotation_of(rope: PlainRope, width: int, positions: Tensor) -> Rotation:
    """The rotation of tokens at `positions` [T] or [B, T] in heads of so many numbers."""
    frequencies, scale = inverse_frequencies(rope, width)
    there = to_device({"frequencies": frequencies}, positions.device)  # the host does not wait for a GPU
    angles = positions.unsqueeze(-1).float() * there["frequencies"]
    return Rotation(angles.cos() * scale, angles.sin() * scale)


def inverse_frequencies(rope: PlainRope, width: int) -> tuple[Tensor, float]:
    """The angle of each pair by position, float32 [E/2], in radians; and the factor of cosines and sines."""
    # On a CPU whatever the device, and in float32: the numbers that transformers has.
    powers: Tensor = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    plain = 1.0 / powers
    match rope:
        case LinearRope():
            return plain / rope.factor, 1.0
        case Llama3Rope():
            # Long waves are divided, short ones kept; how much of one between is kept grows with the turns that it
            # makes in the original positions.
            low, high = rope.low_frequency, rope.high_frequency
            waves = 2 * math.pi / plain
            kept = (rope.original / waves - low) / (high - low)
            mixed = (1 - kept) * plain / rope.factor + kept * plain
            scaled = torch.where(waves > rope.original / low, plain / rope.factor, mixed)
            return torch.where(waves < rope.original / high, plain, scaled), 1.0
        case YarnRope():
            # YaRN's temperature of the scores: queries and keys are each multiplied by the factor.
            return _by_turns(rope, powers), rope.multiplier
    return plain, 1.0


def _by_turns(rope: YarnRope, powers: Tensor) -> Tensor:
    """YaRN's: a ramp over dims between those that turn `fast` and `slow` times in the original positions."""
    pairs = len(powers)
    waves = (rope.original / (turns * 2 * math.pi) for turns in (rope.fast, rope.slow))
    first, last = (pairs * math.log(wave) / math.log(rope.theta) for wave in waves)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # a step, as transformers makes it
    divided = ((torch.arange(pairs, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    kept = 1 - divided
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


class _Rotate(torch.autograd.Function):
    """A rotation that keeps the tables of cosines and sines alone for its backward pass; all layers share these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        # A rotation's gradient is the rotation back.
        return _turned(gradient, cosines, -sines), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, cosines.dtype))
    first, second = wide.chunk(2, -1)
    y = torch.empty(x.shape, dtype=wide.dtype, device=x.device)
    y1, y2 = y.chunk(2, -1)
    # Into halves of one result: cat would copy both once more.
    torch.mul(first, cosines, out=y1).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=y2).addcmul_(first, sines)
    return y.to(x.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [B, T, K, G, E] turned by its tokens' rotation; contiguous."""
    cosines, sines = (table[..., None, None, :].to(torch.promote_types(x.dtype, table.dtype)) for table in rotation)
    if torch.compiler.is_compiling():
        first, second = x.to(cosines.dtype).chunk(2, -1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1).to(x.dtype)
    y: Tensor = _Rotate.apply(x, cosines, sines)
    return y
