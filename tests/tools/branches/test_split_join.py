"""Operators side by side, in modules with known branches."""

from __future__ import annotations

from meshwright.tools.branches.regions import find_split_joins
from tests.tools.branches.modules import (
    ROWS,
    WIDTH,
    Diamond,
    Nested,
    Residuals,
    Sliced,
    ThreeUnequal,
    TwoInputs,
    cost,
    graph_of,
)

LINEAR = cost(WIDTH, WIDTH)
ELEMENTS = ROWS * WIDTH


def test_a_diamond() -> None:
    graph = graph_of(Diamond(WIDTH, WIDTH))
    found = find_split_joins(graph)
    (region,) = found.regions
    assert (region.enter, region.leave, found.lone) == ("split", "mul", 0)
    assert region.names == ("a: linear", "b: linear, relu")
    assert region.flops == (LINEAR, LINEAR + ELEMENTS)
    assert graph.total_flops == 3 * LINEAR + 2 * ELEMENTS
    assert graph.longest_flops == 2 * LINEAR + 2 * ELEMENTS


def test_three_branches_of_unequal_cost_and_a_sum_of_sums() -> None:
    (region,) = find_split_joins(graph_of(ThreeUnequal(WIDTH, WIDTH, WIDTH, WIDTH))).regions
    assert (region.enter, region.leave) == ("split", "sum")
    assert region.flops == (LINEAR, LINEAR, 2 * LINEAR + ELEMENTS)
    assert region.names[2] == "c ... d"


def test_a_region_in_a_branch_of_another() -> None:
    inner, outer = find_split_joins(graph_of(Nested(WIDTH, 4, 4, 4))).regions
    assert (outer.leave, inner.leave) == ("concat", "mul")
    assert outer.flops == (LINEAR + 2 * cost(WIDTH, 4) + ROWS * 4, cost(WIDTH, 4))
    assert inner.flops == (cost(WIDTH, 4), cost(WIDTH, 4))


def test_residuals_are_counted_and_what_is_beside_one_is_found() -> None:
    found = find_split_joins(graph_of(Residuals(WIDTH, WIDTH, WIDTH)))
    (region,) = found.regions
    assert (region.enter, region.leave, region.names) == ("split", "sum", ("b: linear", "c: linear"))
    assert found.lone == 1


def test_slices_of_one_value() -> None:
    (region,) = find_split_joins(graph_of(Sliced())).regions
    assert (region.enter, region.leave, region.flops) == ("slice", "concat", (LINEAR / 2, LINEAR / 2))


def test_an_encoder_beside_the_begin_of_a_decoder() -> None:
    (region,) = find_split_joins(graph_of(TwoInputs(WIDTH, WIDTH, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH))).regions
    assert (region.enter, region.leave, region.names) == ("inputs", "mul", ("stem ... b", "a: linear, relu"))
    assert region.flops == (2 * LINEAR, LINEAR + ELEMENTS)
