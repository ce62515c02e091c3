"""Sums without an order: addends are rounded once to multiples of a power of two, and added exactly.

| sum                    | addends                             | quantum             | added in | exact while          |
|------------------------|-------------------------------------|---------------------|----------|----------------------|
| gradients              | one of each portion and use         | 2^-52               | int64    | |sum| < 2^11         |
| loads of experts       | one of each portion and use         | 1                   | int64    | |sum| < 2^62         |
| loss                   | one of each portion                 | 2^-40               | float64  | sum < 2^12           |
| squares, for the norm  | one of each element, in five digits | 1, 2^-22, ... 2^-88 | float64  | elements < 2^31      |

All of these but the loads are multiplied by the loss scale S (a power of two) or S². Relative to Adam's epsilon of
1e-8, 2^-52 is 2^-25, half of a float32's last bit. Gradients of a mean loss are far below 2^11. If an addend is too
large for a share of the range, or not a number, the gradient norm is not finite, as with any gradient that is not
finite.

Each addend is rounded separately, ties to even, so the result does not depend on the order or on the number of ranks,
microbatches and threads. (Demmel and Nguyen, ARITH 2013, choose the quantum from the largest addend. A fixed quantum
needs no pass to find the largest addend and no second try.)
"""

from __future__ import annotations

import torch
from torch import Tensor

GRADIENT_DIGITS = 52
LOSS_DIGITS = 40

SUMMED_LOSS = 2.0**12
"""The scale of a loss that is summed over elements and divided by the number of elements at the end: sums stay exact
below 2^24."""

PIECE = 2**16
"""Number of elements that are rounded and added at a time, chosen to fit a core's cache."""

SQUARE_DIGITS = (0, 22, 44, 66, 88)
"""The quanta of the digits of a square, as powers of 1/2."""


class FixedPoint:
    """Adder of float32 tensors to int64 sums, as multiples of `scale` · 2^-52."""

    def __init__(self, addends: int, device: torch.device) -> None:
        """`addends`: maximum number of addends of one sum; each addend may use 1 / `addends` of the range."""
        self.limit = 2.0**62 / addends
        """The largest addend, in quanta."""
        self.spoiled = torch.zeros((), dtype=torch.bool, device=device)
        """Whether an addend was too large for its share or not a number."""
        self.begin(1.0)

    def begin(self, scale: float) -> None:
        """Begin a step with losses multiplied by `scale`, a power of two."""
        self.scale = scale
        self.quantum = scale * 2.0**-GRADIENT_DIGITS
        """The power of two that divides all sums."""
        self.spoiled.zero_()

    def add(self, total: Tensor, addend: Tensor, *, fresh: bool, digits: int = GRADIENT_DIGITS) -> None:
        """Add addend [...] float32 to total [...] int64, or overwrite a `fresh` total. The addend is overwritten.

        `digits`: binary digits that are kept of a gradient divided by the loss scale; 0: the addend is a whole number
        without a loss scale, such as a count of tokens.
        """
        totals, addends, factor = total.view(-1), addend.view(-1), 2.0**digits / self.scale if digits else 1.0
        for start in range(0, addends.numel(), PIECE):
            piece, sums = addends[start : start + PIECE].mul_(factor), totals[start : start + PIECE]
            low, high = torch.aminmax(piece)
            self.spoiled |= ~((low > -self.limit) & (high < self.limit))  # comparisons with NaN are false
            if fresh:
                sums.copy_(piece.round_())
            else:
                sums.add_(piece.round_().to(torch.int64))

    def to_float32(self, total: Tensor) -> Tensor:
        """Convert sums [n] int64 to float32, rounded once, in the first half of the same memory."""
        values = total.view(torch.float32)[: total.numel()]
        for start in range(0, total.numel(), PIECE):  # writes stay before the next read
            values[start : start + PIECE] = total[start : start + PIECE].to(torch.float32).mul_(self.quantum)
        return values


def rounded_loss(loss: Tensor, scale: float) -> Tensor:
    """Round a loss to a float64 multiple of `scale` · 2^-40: float64 adds such multiples exactly, in any order."""
    digits = 2.0**LOSS_DIGITS / scale
    return loss.to(torch.float64).mul(digits).round_().div_(digits)


def exact_squares(gradient: Tensor, scale: float, *, rows: bool = False) -> Tensor:
    """Sum the squares of a gradient [n] by digits, float64 [5]; `joined_squares` turns the digits into a number.

    Digits of any parts of the whole gradient may be added in any order. `rows`: sums over the rows of [n, ...] alone,
    [5, ...].
    """
    shape = gradient.shape[1:] if rows else torch.Size()
    digits = torch.zeros(len(SQUARE_DIGITS), *shape, dtype=torch.float64, device=gradient.device)
    for piece in gradient.split(max(1, PIECE // shape.numel())):
        rest = piece.to(torch.float64).div_(scale).square_()
        largest = float(rest.max()) if rest.device.type == "cpu" and rest.numel() else torch.inf
        for index, power in enumerate(SQUARE_DIGITS):
            if largest < 2.0 ** -(power + 1):
                continue  # a digit that is 0 for all
            # Adding and taking away 1.5 · 2^52 quanta rounds to a multiple of the quantum: float64 has no digits below.
            magic = 1.5 * 2.0 ** (52 - power)
            digit = (rest + magic).sub_(magic)
            digits[index] += digit.sum(0) if rows else digit.sum()
            rest.sub_(digit)
    return digits


def joined_squares(digits: Tensor, scale: float) -> Tensor:
    """Return the sum of squares, float64 of the shape behind the digits, added from the smallest digit to the
    largest."""
    total = digits.new_zeros(digits.shape[1:])
    for digit in reversed(digits.unbind()):
        total = total + digit
    return total * scale**2
