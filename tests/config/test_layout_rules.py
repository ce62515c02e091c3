"""The order of a layout's axes and nodes: every mistake is refused with the values that would work."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.config.layout import Layout
from meshwright.ranks.errors import ConfigError

SUBGRAPH = {"kind": "subgraph", "size": 2}


def layout_of(**layout: Any) -> Layout:
    tree = {"data": {"size": 2}, "tensor": SUBGRAPH} | layout
    return parse_config({"model": {"heads": 8, "hidden": 64}, "layout": tree}).layout


def mistake(**layout: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        layout_of(**layout)
    (problem,) = caught.value.problems
    return str(problem)


def test_auto() -> None:
    layout = layout_of(pipeline={"size": 2})
    assert layout.axes == (("data", 2), ("pipe", 2), ("branch", 2))
    assert layout.summary == "data 2 (allreduce), pipe 2 (message-driven), branch 2"
    assert layout.ranks_per_node == "auto"


def test_an_order() -> None:
    layout = layout_of(pipeline={"size": 2}, order=["branch", "data", "pipe"])
    assert layout.axes == (("branch", 2), ("data", 2), ("pipe", 2))
    assert layout.summary == "branch 2, data 2 (allreduce), pipe 2 (message-driven), in this order"


def test_axes_of_one_rank_may_be_left_out() -> None:
    """A named axis of one rank may be at any place; an axis that is not named is first."""
    assert layout_of(order=["branch", "data"]).axes == (("pipe", 1), ("branch", 2), ("data", 2))
    assert layout_of(order=["branch", "pipe", "data"]).axes == (("branch", 2), ("pipe", 1), ("data", 2))
    tesseract = layout_of(order=["col", "row", "data"], tensor={"kind": "tesseract", "q": 2})
    assert tesseract.axes == (("pipe", 1), ("depth", 1), ("col", 2), ("row", 2), ("data", 2))


VALID = r"valid: auto, [data, pipe, branch] in any order (of one rank, may be left out: pipe)"


@pytest.mark.parametrize(
    "order, wrong",
    [
        (["branch", "datum"], "names datum, no axis of this layout (did you mean data?) and leaves data out"),
        (["row", "branch", "data"], "names row, no axis of this layout"),
        (["branch"], "leaves data out"),
        (["branch", "data", "branch"], "names branch 2 times, of which all but the last need a size, such as branch:2"),
        (["branch:2", "data", "branch:1"], "gives a size to the last branch, which has what is left"),
        (["branch:3", "data", "branch"], "cuts branch into 3 parts, which do not divide its 2 ranks"),
        (["branch:two", "data", "branch"], "names branch:two, no axis of this layout (did you mean branch?)"),
        (["branch:2", "branch", "row:2", "row"], "names row, no axis of this layout and leaves data out"),
    ],
    ids=str,
)
def test_no_permutation(order: list[str], wrong: str) -> None:
    assert mistake(order=order) == f"layout.order=[{', '.join(order)}] {wrong}; {VALID}"


def test_an_axis_may_be_split() -> None:
    tesseract = {"kind": "tesseract", "q": 4}
    layout = layout_of(data={"size": 1}, tensor=tesseract, order=["row:2", "col:2", "row", "col"])
    assert layout.axes == (("data", 1), ("pipe", 1), ("depth", 1), ("row", 4), ("col", 4))
    assert layout.nesting[-4:] == (("row", 2), ("col", 2), ("row", 2), ("col", 2))
    assert layout.summary.endswith("row 2, col 2, row 2, col 2, in this order")
    assert layout.world_size == 16
    plain = layout_of(data={"size": 1}, tensor=tesseract, order=["row", "col"])
    assert plain.nesting == plain.axes


def test_no_list() -> None:
    told = "layout.order=branch is neither a list of names nor auto; valid: a list, each a text or auto"
    assert mistake(order="branch") == told


def test_nodes_are_full() -> None:
    assert layout_of(ranks_per_node=2).ranks_per_node == 2
    told = "layout.ranks_per_node=3 does not divide the 4 ranks of the layout; valid: auto, 1, 2, 4"
    assert mistake(ranks_per_node=3) == told
