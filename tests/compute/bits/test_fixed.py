"""Sums that do not depend on the order of addends."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.compute.parameters.exact_gradients import ExactGradients
from meshwright.compute.parameters.fixed import (
    PIECE,
    FixedPoint,
    PairedFixedPoint,
    exact_squares,
    joined_squares,
    rounded_loss,
    rounded_sum,
)
from meshwright.compute.parameters.writes import RowGradient, ScaledGradient
from meshwright.compute.tensor.products import write_part

CPU = torch.device("cpu")


def addends(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return tensors of very different sizes: sums of floats depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-9, 1, (count, 1), generator=generator)
    return list(torch.randn(count, 70_000, generator=generator) * sizes)


def summed(order: list[torch.Tensor], count: int) -> torch.Tensor:
    fixed, total = FixedPoint(count, CPU), torch.empty(70_000, dtype=torch.int64)
    for index, addend in enumerate(order):
        fixed.add(total, addend.clone(), fresh=index == 0)
    assert not fixed.spoiled
    return fixed.to_floats(total).clone()


def test_any_order_has_the_same_bits_and_float64s_sum() -> None:
    parts = addends(13)
    one, other = summed(parts, 13), summed(parts[::-1], 13)
    assert torch.equal(one, other)
    plain = sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])
    assert not torch.equal(*plain), "addends of which any sum would do"
    exact = torch.stack(parts).double().sum(0)
    assert (one - exact).abs().max() <= (plain[0] - exact).abs().max()


def paired(order: list[torch.Tensor]) -> torch.Tensor:
    fixed, total = PairedFixedPoint(len(order), CPU), torch.empty(len(order[0]), 2, dtype=torch.int64)
    for index, addend in enumerate(order):
        fixed.add(total, addend.clone(), fresh=index == 0)
    assert not fixed.spoiled
    return fixed.to_floats(total).clone()


def test_float64_is_added_in_any_order_to_float64s_last_digits() -> None:
    parts = [part.double() * (1 + 1e-9 * index) for index, part in enumerate(addends(13))]
    one, other = paired(parts), paired(parts[::-1])
    assert torch.equal(one, other)
    assert not torch.equal(sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])), "addends of which any sum would do"
    for index in range(0, len(one), 997):
        exact = math.fsum(float(part[index]) for part in parts)
        assert float(one[index]) == pytest.approx(exact, rel=3e-16, abs=0)


def test_rests_of_the_most_addends_do_not_overflow() -> None:
    fixed, total = PairedFixedPoint(1024, CPU), torch.zeros(2, 2, dtype=torch.int64)
    rest = fixed.quantum * torch.tensor([0.5, -0.5], dtype=torch.float64) * (1 - 2.0**-40)
    for index in range(1024):
        fixed.add(total, rest.clone(), fresh=index == 0)
    assert fixed.to_floats(total).tolist() == (1024 * rest).tolist()


def test_a_large_addend_of_a_pair_is_told() -> None:
    fixed, total = PairedFixedPoint(2, CPU), torch.zeros(1, 2, dtype=torch.int64)
    fixed.add(total, torch.tensor([2.0**10], dtype=torch.float64), fresh=True)
    assert fixed.spoiled


def test_a_float64_gradient_is_read_not_written_and_its_small_squares_count() -> None:
    gradient = torch.randn(70_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1e-12
    before = gradient.clone()
    squares = exact_squares(gradient, 1.0)
    assert torch.equal(gradient, before)
    assert float(joined_squares(squares, 1.0)) == pytest.approx(float(before.square().sum()), rel=1e-14)


def test_float64_losses_are_rounded_once_together() -> None:
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    total = float(rounded_sum(losses, 0.25, 1.0))
    assert total == float(rounded_sum(losses.flip(0), 0.25, 1.0))
    assert abs(total - math.fsum((losses * 0.25).tolist())) <= 2.0**-41
    assert total * 2**40 == round(total * 2**40)


def test_each_addend_is_rounded_to_a_multiple_of_the_quantum() -> None:
    fixed, total = FixedPoint(3, CPU), torch.zeros(2, dtype=torch.int64)
    for index in range(3):
        fixed.add(total, fixed.quantum * torch.tensor([0.75, -0.25]), fresh=index == 0)
    assert total.tolist() == [3, 0]


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_pieces_of_small_and_large_elements_have_the_same_integers(scale: float) -> None:
    """Two ways of rounding: a piece with an element of half the scale or more takes the other."""
    generator = torch.Generator().manual_seed(5)
    small = torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-17, 0, (3000,), generator=generator)
    small = torch.cat([small.clamp(-0.49, 0.49), 2.0**-52 * torch.tensor([0.5, 1.5, -0.5, -2.5, 0.25])]) * scale
    wanted = [round(Fraction(x) / Fraction(scale) * 2**52) for x in small.tolist()]
    for beside in (0.25, 0.75):
        fixed, addend = FixedPoint(2, CPU), torch.cat([small, torch.tensor([beside * scale])])
        fixed.begin(scale)
        total = torch.empty(len(addend), dtype=torch.int64)
        for index in range(2):
            fixed.add(total, addend.clone(), fresh=index == 0)
        assert total[:-1].tolist() == [2 * integer for integer in wanted]
        assert int(total[-1]) == round(2 * beside * 2**52)


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("length", [16, 17, 1000, PIECE + 17])
@pytest.mark.parametrize("large", [(), (0,), (1,), (0, 1)])
def test_an_addend_inside_of_its_total_has_the_integers_of_a_separate_one(
    offset: int, length: int, large: tuple[int, ...]
) -> None:
    """`large`: addends with an element that needs the slow way of rounding."""
    generator = torch.Generator().manual_seed(length)
    parts = [torch.randn(length, generator=generator) * 1e-3 for _ in range(2)]
    for index in large:
        parts[index][-1] = 0.75
    fixed, memory = FixedPoint(2, CPU), torch.zeros(length + offset, dtype=torch.int64)
    total, wanted = memory[offset:], torch.zeros(length, dtype=torch.int64)
    assert fixed.holds(total)
    for index, addend in enumerate(parts):
        fixed.add(wanted, addend.clone(), fresh=index == 0)
        if index == 0:
            fixed.first(total).copy_(addend)
            fixed.add(total, fixed.first(total), fresh=True)
            assert torch.equal(total, wanted)
    fixed.first(total).copy_(parts[0])
    fixed.add_to_first(total, parts[1].clone())
    assert torch.equal(total, wanted)
    assert not memory[:offset].any()


@pytest.mark.parametrize("portions", [1, 2, 3])
def test_a_gradient_in_the_bucket_is_rounded_before_the_bucket_is_read(portions: int) -> None:
    generator = torch.Generator().manual_seed(portions)
    parts = [torch.randn(40, 16, generator=generator) * 1e-3 for _ in range(portions)]
    weight, view = nn.Parameter(torch.zeros(40, 16)), torch.full((40, 16), 99)
    gradients = ExactGradients({weight: view}, FixedPoint(3, CPU), None)
    for index, addend in enumerate(parts):
        gradients.begin_pass(0, last_portion=index == portions - 1)
        if index == 1:  # a computed gradient times a factor
            gradients.add(weight, weight, ScaledGradient(addend.clone(), torch.ones(())))
        else:
            gradients.add(weight, weight, partial(write_part, addend))
    gradients.fill(weight)
    assert torch.equal(view, sum((addend.double() * 2**52).round().long() for addend in parts))


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0**10, -(2.0**10)])
def test_an_addend_that_is_too_large_or_no_number_is_told(value: float) -> None:
    fixed, total = FixedPoint(2, CPU), torch.zeros(3, dtype=torch.int64)
    fixed.add(total, torch.tensor([0.0, value, 1.0]), fresh=True)
    assert fixed.spoiled
    fixed.begin(1.0)
    assert not fixed.spoiled


def test_the_largest_addends_do_not_overflow_their_sum() -> None:
    fixed, total = FixedPoint(4, CPU), torch.zeros(1, dtype=torch.int64)
    largest = torch.tensor([math.nextafter(2.0**8, 0)], dtype=torch.float32).nextafter(torch.zeros(1))
    for index in range(4):
        fixed.add(total, largest.clone(), fresh=index == 0)
    assert not fixed.spoiled
    assert float(fixed.to_floats(total)) == 4 * float(largest)


def test_counts_far_beyond_a_gradients_range_are_added_exactly() -> None:
    fixed, total = FixedPoint(1024, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    fixed.begin(2.0**16)
    for index in range(1024):
        fixed.add(total, torch.tensor([2.0**24 - 1, -(2.0**23) - 1]), fresh=index == 0, digits=0)
    assert not fixed.spoiled
    assert total.tolist() == [1024 * (2**24 - 1), -1024 * (2**23 + 1)]


@pytest.mark.parametrize("rows", [20, 3000])
def test_a_look_up_adds_the_integers_of_a_whole_table(rows: int) -> None:
    """20 rows of 200 are read and written alone, 3000 as a whole table."""
    generator = torch.Generator().manual_seed(7)
    table, sums = nn.Parameter(torch.zeros(200, 16)), []
    for whole in (False, True):
        view = torch.full((200, 16), 99)
        gradients = ExactGradients({table: view}, FixedPoint(3, CPU), None)
        generator.manual_seed(7)
        for _ in range(3):
            ids = torch.randint(200, (rows,), generator=generator)
            write = RowGradient(ids, torch.randn(rows, 16, generator=generator), "cpu")
            gradients.add(table, table, partial(RowGradient.__call__, write) if whole else write)
        sums.append(view)
    assert torch.equal(*sums)
    assert len(sums[0].unique()) > 100


def test_squares_are_exact_in_any_parts() -> None:
    gradient = torch.cat([part[:9000] for part in addends(9)])
    whole = joined_squares(exact_squares(gradient, 1.0), 1.0)
    for cut in (1, 7, 65_536, 70_001):
        halves = exact_squares(gradient[:cut], 1.0) + exact_squares(gradient[cut:], 1.0)
        assert torch.equal(joined_squares(halves, 1.0), whole)
    assert torch.equal(joined_squares(exact_squares(gradient.flip(0), 1.0), 1.0), whole)
    assert float(whole) == pytest.approx(float(gradient.double().square().sum()), rel=1e-14)


def test_squares_are_the_sum_of_whole_numbers() -> None:
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-7.0, 3.0).repeat(
        500
    )
    exact = sum(round(Fraction(x) ** 2 * 2**88) for x in gradient.tolist())  # multiples of 2^-88
    for parts in (1, 2, 7, 5000):
        digits = torch.stack([exact_squares(part, 1.0) for part in gradient.chunk(parts)]).sum(0)
        found = sum(round(Fraction(digit) * 2**88) for digit in digits.tolist())
        assert found == exact
        assert float(joined_squares(digits, 1.0)) == float(Fraction(exact, 2**88))


@pytest.mark.parametrize("size", [1e-7, 1e-3, 30.0])
def test_squares_of_any_size_are_near_float64s(size: float) -> None:
    gradient = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * size
    exact = float(gradient.double().square().sum())
    assert float(joined_squares(exact_squares(gradient, 1.0), 1.0)) == pytest.approx(exact, rel=1e-7)


def test_losses_add_up_in_any_order() -> None:
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(2)) * 3
    rounded = [rounded_loss(loss, 1.0) for loss in losses]
    assert float(sum(rounded)) == float(sum(rounded[::-1]))
    assert float(sum(rounded)) == pytest.approx(float(losses.double().sum()), abs=1e-9)


def test_squares_of_rows_are_summed_by_column_in_any_parts() -> None:
    values = torch.randn(500, 7, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-3.0, 4.0)
    whole = exact_squares(values, 1.0, rows=True)
    halves = sum(exact_squares(half, 1.0, rows=True) for half in values.flip(0).split(173))
    assert isinstance(halves, torch.Tensor)
    assert joined_squares(halves, 1.0).tolist() == joined_squares(whole, 1.0).tolist()
    each = [joined_squares(exact_squares(column.contiguous(), 1.0), 1.0) for column in values.unbind(1)]
    assert joined_squares(whole, 1.0).tolist() == torch.stack(each).tolist()
