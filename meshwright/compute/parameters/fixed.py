"""Sums without an order: addends are rounded once to multiples of a power of two, and added exactly.

| sum                    | addends                             | quantum             | added in | exact while          |
|------------------------|-------------------------------------|---------------------|----------|----------------------|
| gradients              | one of each portion and use         | 2^-52               | int64    | |sum| < 2^11         |
| rests, in float64      | one of each gradient                | 2^-92 for 2^20      | int64    | always               |
| loads of experts       | one of each portion and use         | 1                   | int64    | |sum| < 2^62         |
| loss                   | one of each portion                 | 2^-40               | float64  | sum < 2^12           |
| squares, for the norm  | one of each element, in five digits | 1, 2^-22, ... 2^-88 | float64  | elements < 2^31      |
| squares, in float64    | one of each element, in 8 digits    | 1, ... 2^-154       | float64  | elements < 2^31      |

All of these but the loads are multiplied by the loss scale S (a power of two) or S². Relative to Adam's epsilon of
1e-8, 2^-52 is 2^-25, half of a float32's last bit. Gradients of a mean loss are far below 2^11. If an addend is too
large for a share of the range, or not a number, the gradient norm is not finite, as with any gradient that is not
finite. A rest has 40 binary digits behind the gradient's 52 if there are 2^20 addends, and more if there are fewer.

Each addend is rounded separately, ties to even, so the result does not depend on the order or on the number of ranks,
microbatches and threads. (Demmel and Nguyen, ARITH 2013, choose the quantum from the largest addend. A fixed quantum
needs no pass to find the largest addend and no second try.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GRADIENT_DIGITS = 52
LOSS_DIGITS = 40

SUMMED_LOSS = 2.0**12
"""The scale of a loss that is summed over elements and divided by the number of elements at the end: sums stay exact
below 2^24."""

PIECE = 2**18
"""Number of elements that are rounded and added at a time, chosen to fit a cache: of 2^16 a call costs half."""

REST_DIGITS = 26
"""Digits of a loss below its quantum that are added exactly before one rounding, of up to 2^26 losses."""

SQUARE_DIGITS: Mapping[torch.dtype, tuple[int, ...]] = {
    torch.float32: (0, 22, 44, 66, 88), torch.float64: (0, 22, 44, 66, 88, 110, 132, 154),
}  # fmt: skip
"""The quanta of the digits of a square, as powers of 1/2, by the dtype of gradients."""

WIDE_DIGITS: Mapping[torch.dtype, tuple[int, ...]] = {
    torch.float32: (0, 44, 88), torch.float64: (0, 44, 88, 132, 154),
}  # fmt: skip
"""The quanta of a square's digits in a sum of at most `RUN` squares, by the dtype of gradients."""

RUN = 2**10
"""Number of squares that are added first: 2^53 is RUN times the 2^43 values of a digit."""


class FixedPoint:
    """Adder of float32 tensors to int64 sums, as multiples of `scale` · 2^-52."""

    dtype = torch.float32
    """The dtype of addends and of converted sums."""

    def __init__(self, addends: int, device: torch.device) -> None:
        """`addends`: maximum number of addends of one sum; each addend may use 1 / `addends` of the range."""
        self.limit = 2.0**62 / addends
        """The largest addend, in quanta."""
        self.spoiled = torch.zeros((), dtype=torch.bool, device=device)
        """Whether an addend was too large for its share or not a number."""
        self.room = torch.empty(PIECE if device.type == "cpu" else 0, dtype=torch.float64, device=device)
        """Memory of a piece, on a CPU: allocating it for each piece takes longer than adding."""
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

        On a CPU a piece below half of the loss scale S takes half of the time: float64 has multiples of S · 2^-52
        between S and 2 S, so adding 1.5 S rounds, and the bits of the result less the bits of 1.5 S are the integer.
        """
        totals, addends, factor = total.view(-1), addend.view(-1), 2.0**digits / self.scale if digits else 1.0
        most = min(self.scale / 2, self.limit * self.quantum) if digits == GRADIENT_DIGITS and len(self.room) else 0.0
        middle = np.float64(1.5 * self.scale)
        for start in range(0, addends.numel(), PIECE):
            piece, sums = addends[start : start + PIECE], totals[start : start + PIECE]
            low, high = torch.aminmax(piece)
            if most and max(-float(low), float(high)) < most:  # comparisons with NaN are false
                integers, target = integers_of(self.room[: len(piece)].copy_(piece).add_(middle)), integers_of(sums)
                # torch multiplies integers by 1 before adding, which takes three times as long as numpy's sum.
                np.subtract(integers, middle.view(np.int64), out=target if fresh else integers)
                if not fresh:
                    np.add(target, integers, out=target)
                continue
            low, high, piece = low * factor, high * factor, piece.mul_(factor)
            self.spoiled |= ~((low > -self.limit) & (high < self.limit))
            if fresh:
                sums.copy_(piece.round_())
            else:
                sums.add_(piece.round_().to(torch.int64))

    def to_floats(self, total: Tensor) -> Tensor:
        """Convert sums [n] int64 to float32, rounded once, in the first half of the same memory."""
        values, room = total.view(torch.float32)[: total.numel()], self.room.view(torch.float32)
        for start in range(0, total.numel(), PIECE):  # writes stay before the next read
            piece = total[start : start + PIECE]
            rounded = room[: len(piece)].copy_(piece) if len(room) else piece.to(torch.float32)
            torch.mul(rounded, self.quantum, out=values[start : start + PIECE])
        return values


class PairedFixedPoint(FixedPoint):
    """Adder of float64 tensors to pairs of int64 sums: multiples of the quantum, and of a small part of the quantum.

    Of each addend the multiple of the quantum is taken away exactly; the rest is rounded once. Both sums are exact.
    """

    dtype = torch.float64

    def __init__(self, addends: int, device: torch.device) -> None:
        super().__init__(addends, device)
        self.parts = 2.0 ** (62 - addends.bit_length())
        """The units of the second sum in a quantum; a rest has at most half of this number."""

    def add(self, total: Tensor, addend: Tensor, *, fresh: bool, digits: int = GRADIENT_DIGITS) -> None:
        """Add addend [...] float64 to total [..., 2] int64, as in `FixedPoint`. The addend is overwritten."""
        totals, addends, factor = total.view(-1, 2), addend.view(-1), 2.0**digits / self.scale if digits else 1.0
        for start in range(0, addends.numel(), PIECE):
            piece, sums = addends[start : start + PIECE].mul_(factor), totals[start : start + PIECE]
            low, high = torch.aminmax(piece)
            self.spoiled |= ~((low > -self.limit) & (high < self.limit))  # comparisons with NaN are false
            whole = piece.round()
            both = torch.stack([whole, piece.sub_(whole).mul_(self.parts).round_()], -1)
            if fresh:
                sums.copy_(both)
            else:
                sums.add_(both.to(torch.int64))

    def to_floats(self, total: Tensor) -> Tensor:
        """Convert sums [n, 2] int64 to float64 [n], in the first half of the same memory."""
        values = total.view(torch.float64).view(-1)[: len(total)]
        for start in range(0, len(total), PIECE):  # writes stay before the next read
            whole, rest = total[start : start + PIECE].to(torch.float64).unbind(-1)
            values[start : start + PIECE] = rest.div_(self.parts).add_(whole).mul_(self.quantum)
        return values


def floats_in(gradients: Tensor) -> Tensor:
    """Return the memory [n] of a slot's gradient. For int64 sums: the first half of the bytes, as float32, or as
    float64 for pairs [n, 2]."""
    if gradients.dtype != torch.int64:
        return gradients
    dtype = torch.float32 if gradients.dim() == 1 else torch.float64
    return gradients.view(dtype).view(-1)[: len(gradients)]


def integers_of(x: Tensor) -> npt.NDArray[np.int64]:
    """Return the memory of x [n], of 8 bytes an element on a CPU, as integers of numpy.

    Not `x.numpy()`: torch then refuses to free the memory of a bucket (`resize_`).
    """
    return np.frombuffer(memoryview((ctypes.c_int64 * len(x)).from_address(x.data_ptr())), np.int64)


def rounded_loss(loss: Tensor, scale: float) -> Tensor:
    """Round a loss to a float64 multiple of `scale` · 2^-40: float64 adds such multiples exactly, in any order."""
    digits = 2.0**LOSS_DIGITS / scale
    return loss.to(torch.float64).mul(digits).round_().div_(digits)


def rounded_sum(losses: Tensor, factor: float, scale: float) -> Tensor:
    """Sum `factor` times losses [n], as a float64 multiple of `scale` · 2^-40.

    Losses in float32 are rounded each. In float64 the sum is rounded, and each loss only to `scale` · 2^-66.
    """
    wide = losses.to(torch.float64) * factor
    rounded = rounded_loss(wide, scale)
    if losses.dtype != torch.float64:
        return rounded.sum()
    rests = rounded_loss(wide - rounded, scale * 2.0**-REST_DIGITS)
    return rounded_loss(rounded.sum() + rests.sum(), scale)


def exact_squares(gradient: Tensor, scale: float, *, rows: bool = False) -> Tensor:
    """Sum the squares of a gradient [n] by digits, float64 [digits]; `joined_squares` turns digits into a number.

    Digits of any parts of the whole gradient may be added in any order: the joined number is the same. `rows`: sums
    over the rows of [n, ...] alone, [digits, ...]. The digits: SQUARE_DIGITS.
    """
    shape = gradient.shape[1:] if rows else torch.Size()
    length = min(RUN, max(1, PIECE // shape.numel())) if rows else PIECE
    size = (min(length, len(gradient)), *shape) if rows else (-(-min(length, len(gradient)) // RUN) * RUN,)
    every, rounded = torch.empty(2, *size, dtype=torch.float64, device=gradient.device)
    sums = [gradient.new_zeros(1, *shape, dtype=torch.float64)]
    for piece in gradient.split(length):
        low, high = torch.aminmax(piece) if piece.device.type == "cpu" and piece.numel() else (torch.inf, torch.inf)
        largest = (max(-float(low), float(high)) / scale) ** 2
        every[len(piece) :].zero_()
        every[: len(piece)].copy_(piece)
        if scale != 1:
            every.div_(scale)
        every.square_()
        for power in WIDE_DIGITS[gradient.dtype]:
            if largest < 2.0 ** -(power + 1):
                continue  # a digit that is 0 for all
            # Adding and taking away 1.5 · 2^52 quanta rounds to a multiple of the quantum: float64 has no digits below.
            magic = 1.5 * 2.0 ** (52 - power)
            torch.add(every, magic, out=rounded).sub_(magic)
            sums.append(rounded.sum(0, keepdim=True) if rows else rounded.view(-1, RUN).sum(1))
            if power < WIDE_DIGITS[gradient.dtype][-1]:
                every.sub_(rounded)
    rest, digits = torch.cat(sums), []
    for power in SQUARE_DIGITS[gradient.dtype]:
        magic = 1.5 * 2.0 ** (52 - power)
        digit = (rest + magic).sub_(magic)
        digits.append(digit.sum(0))
        rest.sub_(digit)
    return torch.stack(digits)


def joined_squares(digits: Tensor, scale: float) -> Tensor:
    """Return the sum of squares, float64 of the shape behind the digits, added from the smallest digit to the
    largest.

    First each digit is carried into the next larger digit, so that equal sums have equal digits.
    """
    carried = [*digits.unbind()]
    powers = SQUARE_DIGITS[torch.float64]  # float32's are the first five
    for index in range(len(carried) - 1, 0, -1):
        larger = 2.0 ** -powers[index - 1]
        carry = (carried[index] / larger).floor_().mul_(larger)
        carried[index], carried[index - 1] = carried[index] - carry, carried[index - 1] + carry
    total = digits.new_zeros(digits.shape[1:])
    for digit in reversed(carried):
        total = total + digit
    return total * scale**2
