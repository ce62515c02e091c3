"""Sums in which order cannot matter: addends are rounded once to multiples of a power of two, and added exactly.

| sum                    | addends                             | quantum             | added in | exact while          |
|------------------------|-------------------------------------|---------------------|----------|----------------------|
| gradients              | one of each portion and use         | 2^-52               | int64    | |sum| < 2^11         |
| loss                   | one of each portion                 | 2^-40               | float64  | sum < 2^12           |
| squares, for the norm  | one of each element, in five digits | 1, 2^-22, ... 2^-88 | float64  | elements < 2^31      |

All of them times the loss scale S, or its square, a power of two. 2^-52 beside Adam's epsilon of 1e-8 is 2^-25, a
float32's half last bit; a gradient of a mean loss is nowhere near 2^11. A run whose addend is too large for its share
of that (or no number at all) is told so by a norm that is not finite, as any run whose gradient is not.

The rounding is of each addend by itself, to even where it lies halfway, so neither the order nor the number of ranks,
microbatches and threads enters it. (Demmel and Nguyen, ARITH 2013, choose the quantum from the largest addend; a fixed
one needs no pass to find it and no second try.)
"""

from __future__ import annotations

import torch
from torch import Tensor

GRADIENT_DIGITS = 52
LOSS_DIGITS = 40

SUMMED_LOSS = 2.0**12
"""The scale of a loss that is summed over its elements, whose number divides it at the end: sums stay exact below
2^24."""

PIECE = 2**16
"""Elements that are rounded and added at a time: what a core's cache holds of them."""

SQUARE_DIGITS = (0, 22, 44, 66, 88)
"""The quanta of the digits of a square, as powers of 1/2."""


class FixedPoint:
    """Adds float32 tensors into int64 ones, as multiples of `scale` · 2^-52."""

    def __init__(self, addends: int, device: torch.device) -> None:
        """`addends`: the most that one sum has; each may have that part of the range."""
        self.limit = 2.0**62 / addends
        """The largest addend, in quanta."""
        self.spoiled = torch.zeros((), dtype=torch.bool, device=device)
        """Whether an addend was too large for its share, or no number."""
        self.begin(1.0)

    def begin(self, scale: float) -> None:
        """A step begins, of losses times `scale`, a power of two."""
        self.scale = scale
        self.quantum = scale * 2.0**-GRADIENT_DIGITS
        """The power of two of which sums are multiples."""
        self.spoiled.zero_()

    def add(self, total: Tensor, addend: Tensor, *, fresh: bool) -> None:
        """total += addend, or = where it is `fresh`. total [...] int64; addend [...] float32, which is used up."""
        totals, addends, factor = total.view(-1), addend.view(-1), 2.0**GRADIENT_DIGITS / self.scale
        for start in range(0, addends.numel(), PIECE):
            piece, sums = addends[start : start + PIECE].mul_(factor), totals[start : start + PIECE]
            low, high = torch.aminmax(piece)
            self.spoiled |= ~((low > -self.limit) & (high < self.limit))  # a comparison with what is no number is false
            if fresh:
                sums.copy_(piece.round_())
            else:
                sums.add_(piece.round_().to(torch.int64))

    def to_float32(self, total: Tensor) -> Tensor:
        """The sums [n] int64 as float32, rounded once, in the first half of their own memory."""
        values = total.view(torch.float32)[: total.numel()]
        for start in range(0, total.numel(), PIECE):  # what is written lies before what is read next
            values[start : start + PIECE] = total[start : start + PIECE].to(torch.float32).mul_(self.quantum)
        return values


def rounded_loss(loss: Tensor, scale: float) -> Tensor:
    """A loss as a float64 multiple of `scale` · 2^-40: float64 adds such exactly, in any order."""
    digits = 2.0**LOSS_DIGITS / scale
    return loss.to(torch.float64).mul(digits).round_().div_(digits)


def exact_squares(gradient: Tensor, scale: float) -> Tensor:
    """The sum of the squares of a gradient [n] by digits, float64 [5]; `joined_squares` makes it a number.

    Digits of any parts of the whole gradient may be added in any order.
    """
    digits = torch.zeros(len(SQUARE_DIGITS), dtype=torch.float64, device=gradient.device)
    for piece in gradient.split(PIECE):
        rest = piece.to(torch.float64).div_(scale).square_()
        largest = float(rest.max()) if rest.device.type == "cpu" and rest.numel() else torch.inf
        for index, power in enumerate(SQUARE_DIGITS):
            if largest < 2.0 ** -(power + 1):
                continue  # a digit that is 0 for all
            # Adding and taking away 1.5 · 2^52 quanta rounds to a multiple of the quantum: float64 has no digits below.
            magic = 1.5 * 2.0 ** (52 - power)
            digit = (rest + magic).sub_(magic)
            digits[index] += digit.sum()
            rest.sub_(digit)
    return digits


def joined_squares(digits: Tensor, scale: float) -> Tensor:
    """The sum of squares, a float64 scalar, from the smallest digit to the largest."""
    total = digits.new_zeros(())
    for digit in reversed(digits.unbind()):
        total = total + digit
    return total * scale**2
