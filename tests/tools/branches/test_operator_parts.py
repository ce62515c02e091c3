"""Parts of operators as branches, in modules with known parts."""

from __future__ import annotations

import pytest

from meshwright.tools.branches.regions import find_operator_parts
from tests.tools.branches.modules import WIDTH, FeedForward, GroupedConvolution, Heads, cost, graph_of

IMAGE = (2, 6, 5, 5)
PIXELS = 2 * 25
TOKENS = (2, 5, WIDTH)


@pytest.mark.parametrize("norm_groups, groups", [(4, 4), (8, 4), (2, 2)])
def test_groups_of_a_convolution_as_far_as_the_norms_keep_them_apart(norm_groups: int, groups: int) -> None:
    """A norm over 2 groups of channels joins two and two of the convolution's 4 groups."""
    core, whole = find_operator_parts(graph_of(GroupedConvolution(norm_groups), IMAGE))
    inside = 2 * PIXELS * 16 * 4 * 9 + 2 * PIXELS * 16  # the convolution; norm and ReLU
    assert (core.form, core.enter, core.leave, core.cuts_linears) == ("groups", "slice", "concat", False)
    assert core.flops == (inside / groups,) * groups
    assert (whole.enter, whole.leave, whole.linears) == ("split", "sum", ("expand", "contract"))
    assert whole.total_flops == inside + 2 * 2 * PIXELS * 6 * 16
    assert len(whole.flops) == groups


def test_heads_with_linears_that_are_read_nowhere_else() -> None:
    attention = 2 * 2 * 2 * 5 * 5 * WIDTH
    core, whole = find_operator_parts(graph_of(Heads(shows=False), TOKENS))
    assert (core.form, core.flops) == ("heads", (attention / 4,) * 4)
    assert whole.flops == ((attention + 4 * cost(WIDTH, WIDTH, 10)) / 4,) * 4
    assert whole.linears == ("query", "key", "value", "output")


def test_heads_whose_values_are_seen_outside_are_alone() -> None:
    (core,) = find_operator_parts(graph_of(Heads(shows=True), TOKENS))
    assert (core.form, len(core.flops), core.linears) == ("heads", 4, ())


def test_columns_of_a_hidden_layer_that_nothing_mixes() -> None:
    (region,) = find_operator_parts(graph_of(FeedForward(normed=False)))
    assert (region.form, region.enter, region.leave) == ("columns", "split", "sum")
    assert region.flops == ((2 * cost(WIDTH, 32) + 6 * 32) / 32,) * 32
    assert find_operator_parts(graph_of(FeedForward(normed=True))) == ()
