"""Rotary positions (Su et al., arXiv 2104.09864): pairs of a head's elements are rotated by angles proportional to the
token's position, so that scores depend on distances.

    y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin        x1, x2 [..., E/2]: the halves of a head
    dx1 = dy1 cos + dy2 sin,  dx2 = dy2 cos - dy1 sin

Angles, cosines and sines are float32 in any precision of the run, as in transformers. They are computed element by
element, so a position has equal bits on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.model import to_device
from meshwright.compute.models.rotary_section import LinearRope, Llama3Rope, PlainRope, YarnRope


class Rotation(NamedTuple):
    """Cosines and sines of tokens' angles, float32: [T, E/2], or [B, T, E/2] if positions differ by row."""

    cosines: Tensor
    sines: Tensor


def rotation_of(frequencies: Sequence[float], scale: float, positions: Tensor) -> Rotation:
    """Return the rotation of tokens at `positions` [T] or [B, T]. `frequencies`, `scale`: of angles_of."""
    given = torch.tensor(frequencies, dtype=torch.float32, device="cpu")
    there = to_device({"frequencies": given}, positions.device)  # the host does not wait for a GPU
    angles = positions.unsqueeze(-1).float() * there["frequencies"]
    return Rotation(angles.cos() * scale, angles.sin() * scale)


@cache  # a plan makes a model for each recording
def angles_of(rope: PlainRope, width: int) -> tuple[tuple[float, ...], float]:
    """Return `inverse_frequencies` as numbers."""
    frequencies, scale = inverse_frequencies(rope, width)
    return tuple(frequencies.tolist()), scale


def inverse_frequencies(rope: PlainRope, width: int) -> tuple[Tensor, float]:
    """Return the angle of each pair per position, float32 [E/2], in radians; and the factor of cosines and sines."""
    # Always on a CPU and in float32, for numbers equal to transformers'.
    powers: Tensor = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    plain = 1.0 / powers
    match rope:
        case LinearRope():
            return plain / rope.factor, 1.0
        case Llama3Rope():
            # Frequencies of long waves are divided, of short waves kept, and between mixed: the kept share grows with
            # the number of turns within the original positions.
            low, high = rope.low_frequency, rope.high_frequency
            waves = 2 * math.pi / plain
            share = (rope.original / waves - low) / (high - low)
            mixed = (1 - share) * plain / rope.factor + share * plain
            scaled = torch.where(waves > rope.original / low, plain / rope.factor, mixed)
            return torch.where(waves < rope.original / high, plain, scaled), 1.0
        case YarnRope():
            # YaRN's temperature of the scores: queries and keys are each multiplied by the factor.
            return _by_turns(rope, powers), rope.multiplier
    return plain, 1.0


def _by_turns(rope: YarnRope, powers: Tensor) -> Tensor:
    """Return YaRN's frequencies: a ramp from the dim with `fast` turns in the original positions to `slow` turns."""
    pairs = len(powers)
    waves = (rope.original / (turns * 2 * math.pi) for turns in (rope.fast, rope.slow))
    first, last = (pairs * math.log(wave) / math.log(rope.theta) for wave in waves)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # makes a step of the ramp, as in transformers
    divided = ((torch.arange(pairs, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    share = 1 - divided
    return 1.0 / (rope.factor * powers) * (1 - share) + 1.0 / powers * share


class _Rotate(torch.autograd.Function):
    """A rotation that saves only the tables of cosines and sines for backward; all layers share the tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(x, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        # The gradient of a rotation is the inverse rotation.
        return _turned(gradient, cosines, -sines), None, None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return x [..., E] rotated; cosines and sines are in the wider dtype of x and the tables."""
    wide = x.to(cosines.dtype)
    first, second = wide.chunk(2, -1)
    y = torch.empty(x.shape, dtype=wide.dtype, device=x.device)
    y1, y2 = y.chunk(2, -1)
    # Both halves are written into one result: `cat` would copy both.
    torch.mul(first, cosines, out=y1).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=y2).addcmul_(first, sines)
    return y.to(x.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x [B, T, K, G, E] by the tokens' rotation. The result is contiguous."""
    wide = torch.promote_types(x.dtype, rotation.cosines.dtype)
    cosines, sines = (table[..., None, None, :].to(wide) for table in rotation)
    if torch.compiler.is_compiling():
        first, second = x.to(cosines.dtype).chunk(2, -1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1).to(x.dtype)
    y: Tensor = _Rotate.apply(x, cosines, sines)
    return y
