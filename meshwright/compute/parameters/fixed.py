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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

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

NOTHING: Array = np.empty(0)

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
        size = PIECE if device.type == "cpu" else 0
        self.rooms = np.empty((2, size))
        """Memory of pieces, on a CPU: allocating it for each piece takes longer than adding."""
        self.begin(1.0)

    def begin(self, scale: float) -> None:
        """Begin a step with losses multiplied by `scale`, a power of two."""
        self.scale = scale
        self.quantum = scale * 2.0**-GRADIENT_DIGITS
        """The power of two that divides all sums."""
        self.most = min(scale / 2, self.limit * self.quantum)
        """Addends below this number are rounded in the short way (`shifted`)."""
        self.middle = np.full(1, 1.5 * scale)
        """The number that rounds an addend by an addition, [1]."""
        self.bits = self.middle.view(np.int64)
        """The bits of `middle`, [1]."""
        self.spoiled.zero_()

    def add(self, total: Tensor, addend: Tensor, *, fresh: bool, digits: int = GRADIENT_DIGITS) -> None:
        """Add addend [...] float32 to total [...] int64, or overwrite a `fresh` total. The addend is overwritten.

        `digits`: binary digits that are kept of a gradient divided by the loss scale; 0: the addend is a whole number
        without a loss scale, such as a count of tokens. A fresh total may hold the addend (`first`).
        """
        count, factor = addend.numel(), 2.0**digits / self.scale if digits else 1.0
        short = digits == GRADIENT_DIGITS and self.rooms.size > 0
        sums, values = (array_of(total), array_of(addend)) if short else (NOTHING, NOTHING)
        for start in reversed(range(0, count, PIECE)):  # an addend inside of its total is read before it is written
            here = slice(start, min(start + PIECE, count))
            if short and (integers := self.shifted(values[here], self.rooms[0])) is not None:
                target = sums[here]
                # torch multiplies integers by 1 before adding, which takes three times as long as numpy's sum.
                np.subtract(integers, self.bits, out=target if fresh else integers)
                if not fresh:
                    np.add(target, integers, out=target)
                continue
            piece = addend.view(-1)[here]
            low, high = torch.aminmax(piece)
            low, high, piece = low * factor, high * factor, piece.mul(factor)
            self.spoiled |= ~((low > -self.limit) & (high < self.limit))
            if fresh:
                total.view(-1)[here].copy_(piece.round_())
            else:
                total.view(-1)[here].add_(piece.round_().to(torch.int64))

    def shifted(self, values: Array, room: Array) -> Array | None:
        """Return the integers of values [n] float32 plus the bits of `middle`, in the memory of `room`, on a CPU.

        None if a value is half of the loss scale S or more, too large for its share, or NaN. Else this takes half of
        the time: float64 has multiples of S · 2^-52 between S and 2 S, so adding 1.5 S rounds, and the bits of the
        result less the bits of 1.5 S are the integer.
        """
        if not max(-float(values.min()), float(values.max())) < self.most:  # NaN is not less
            return None
        wide = room[: len(values)]
        np.copyto(wide, values)
        np.add(wide, self.middle, out=wide)
        return wide.view(np.int64)

    def holds(self, total: Tensor) -> bool:
        """Return whether a sum [...] int64 can hold an addend that is rounded later (`first`): on a CPU, in float32."""
        return self.dtype == torch.float32 and self.rooms.size > 0 and total.numel() >= 16

    def first(self, total: Tensor) -> Tensor:
        """Return memory [n] float32 inside of a sum [...] int64 of 16 elements or more, at a cache line."""
        start = -total.data_ptr() % 64 // 4
        return total.view(-1).view(torch.float32)[start : start + total.numel()]

    def add_to_first(self, total: Tensor, addend: Tensor) -> None:
        """Overwrite total [...] int64 by the sum of its `first` addend and addend [...] float32."""
        first, count = self.first(total), addend.numel()
        sums, early, late = array_of(total), array_of(first), array_of(addend)
        for start in reversed(range(0, count, PIECE)):  # as in `add`
            here = slice(start, min(start + PIECE, count))
            integers, others = self.shifted(early[here], self.rooms[0]), self.shifted(late[here], self.rooms[1])
            if integers is not None and others is not None:
                np.add(integers, others, out=others)
                np.subtract(others, self.bits + self.bits, out=sums[here])
            else:
                self.add(total.view(-1)[here], first[here].clone(), fresh=True)
                self.add(total.view(-1)[here], addend.view(-1)[here], fresh=False)

    def to_floats(self, total: Tensor) -> Tensor:
        """Convert sums [n] int64 to float32, rounded once, in the first half of the same memory."""
        values, short = total.view(torch.float32)[: total.numel()], self.rooms.size > 0
        sums, floats = (array_of(total), array_of(values)) if short else (NOTHING, NOTHING)
        for start in range(0, total.numel(), PIECE):  # writes stay before the next read
            here = slice(start, min(start + PIECE, total.numel()))
            if short:
                rounded = self.rooms[0].view(np.float32)[: here.stop - start]
                np.copyto(rounded, sums[here], casting="unsafe")
                np.multiply(rounded, np.float32(self.quantum), out=floats[here])
            else:
                torch.mul(total[here].to(torch.float32), self.quantum, out=values[here])
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


def array_of(x: Tensor) -> Array:
    """Return the memory of contiguous x on a CPU, int64 or float32, as an array [n] of numpy.

    Not `x.numpy()`: torch then refuses to free the memory of a bucket (`resize_`).
    """
    assert x.is_contiguous(), "an array of strided memory"
    element, dtype = (ctypes.c_int64, np.int64) if x.dtype == torch.int64 else (ctypes.c_float, np.float32)
    return np.frombuffer(memoryview((element * x.numel()).from_address(x.data_ptr())), dtype)


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
        if largest < 1 and not rows and gradient.dtype == torch.float32:
            sums.append(squares_below_one(array_of(piece.contiguous()), scale, every.numpy(), rounded.numpy()))
            continue
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


def squares_below_one(values: Array, scale: float, every: Array, rounded: Array) -> Tensor:
    """Return float64 [4] with the exact sum of values², rounded each to 2^-88, of up to 2^18 float32 values below 1.

    Two digits of each square are added as int64, as in `FixedPoint.shifted`. Values are divided by `scale`. `every`,
    `rounded`: memory of this number of float64.
    """
    every, rounded, parts = every[: len(values)], rounded[: len(values)], []
    np.copyto(every, values)
    if scale != 1:
        np.multiply(every, 1 / scale, out=every)
    np.multiply(every, every, out=every)
    for power in (44, 88):
        middle = np.full(1, 1.5 * 2.0 ** (52 - power))
        np.add(every, middle, out=rounded)
        integers = int(rounded.view(np.int64).sum()) - len(values) * int(middle.view(np.int64)[0])
        integers = (integers + 2**63) % 2**64 - 2**63  # numpy's sum wraps around
        parts += [(integers >> 30) * 2.0 ** (30 - power), integers % 2**30 * 2.0**-power]
        if power == 44:
            np.subtract(rounded, middle, out=rounded)
            np.subtract(every, rounded, out=every)
    return torch.tensor(parts, dtype=torch.float64)


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
