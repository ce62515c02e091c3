"""The general translation: a plan that moves every element once, and a verb that follows the plan, both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compute.parameters.shard import Box
from meshwright.compute.subgraph.translation import RowLayout, intervals, nearly_even, plan_translation, translate
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks


@st.composite
def holders(draw: st.DrawFn, size: int) -> range:
    start = draw(st.integers(0, size - 1))
    return range(start, draw(st.integers(start + 1, size)))


def rows_on(num_rows: int, ranks: range, size: int) -> RowLayout:
    return tuple(Box((rows.start,), (len(rows),)) for rows in nearly_even(num_rows, ranks, size))


@given(st.data(), st.integers(0, 20), st.integers(1, 6))
def test_every_row_comes_once_from_who_has_it(data: st.DataObject, num_rows: int, size: int) -> None:
    source = rows_on(num_rows, data.draw(holders(size)), size)
    target = rows_on(num_rows, data.draw(holders(size)), size)
    arrived: list[list[int]] = [[] for _ in range(size)]
    for message in plan_translation(source, target):
        assert message.box.num_elements > 0
        rows = range(num_rows)[message.box.slices[0]]
        assert set(rows) <= set(range(num_rows)[source[message.sender].slices[0]])
        arrived[message.receiver] += rows
    assert arrived == [list(range(num_rows)[box.slices[0]]) for box in target]
    back = {(message.receiver, message.sender, message.box) for message in plan_translation(target, source)}
    assert back == {(message.sender, message.receiver, message.box) for message in plan_translation(source, target)}


@given(st.data(), st.integers(0, 20), st.integers(1, 6))
def test_rows_are_nearly_even_on_the_holders(data: st.DataObject, length: int, size: int) -> None:
    ranks = data.draw(holders(size))
    parts = nearly_even(length, ranks, size)
    assert [row for part in parts for row in part] == list(range(length))
    counts = [len(parts[rank]) for rank in ranks]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1
    assert not any(len(parts[rank]) for rank in range(size) if rank not in ranks)


def test_intervals() -> None:
    assert intervals((2, 0, 3)) == (range(2), range(2, 2), range(2, 5))


def layouts(size: int) -> dict[str, tuple[RowLayout, RowLayout]]:
    """Return pairs of layouts of [7, 5] on the ranks of an axis."""
    everything = (Box((0, 0), (7, 5)),) * size
    columns = tuple(Box((0, part.start), (7, len(part))) for part in nearly_even(5, range(size), size))

    def rows(ranks: range) -> RowLayout:
        return tuple(Box((*box.offsets, 0), (*box.lengths, 5)) for box in rows_on(7, ranks, size))

    return {
        "fewer to more": (rows(range(2)), rows(range(size))),
        "first to last": (rows(range(1)), rows(range(size - 1, size))),
        "apart": (rows(range(size // 2)), rows(range(size // 2, size))),
        "split": (rows(range(1, size)), everything),
        "sum": (everything, rows(range(2))),
        "slice": (rows(range(size)), columns),
        "concat": (columns, rows(range(1, size))),
    }


def whole(index: int) -> Tensor:
    """[7, 3, 5], another for each rank."""
    return torch.arange(105.0, dtype=torch.float64).view(7, 3, 5) + 1000 * (index + 1)


def cut(x: Tensor, box: Box) -> Tensor:
    rows, columns = box.slices
    return x[rows, :, columns]


def run_all(mesh: Mesh) -> dict[str, tuple[Tensor, Tensor, dict[tuple[str, str], int]]]:
    """Return by name this rank's part, the gradient of the rank's input, and calls of the forward pass by axis and
    verb."""
    index, results = mesh.index("branch"), {}
    for name, (source, target) in layouts(mesh.size("branch")).items():
        x = cut(whole(index), source[index]).clone().requires_grad_()
        mesh.ledger.traffic.clear()
        y = translate(x, mesh, "branch", source, target, (0, 2))
        calls = {key: entry.calls for key, entry in mesh.ledger.traffic.items()}
        y.backward(cut(whole(index), target[index]).transpose(0, 1).contiguous().transpose(0, 1))  # with strides
        assert x.grad is not None
        results[name] = y.detach(), x.grad, calls
    return results


def summed(source: RowLayout, target: RowLayout, index: int) -> Tensor:
    """Return the values for member `index`: each element summed over all ranks that have the element."""
    total = torch.zeros(7, 3, 5, dtype=torch.float64)
    for rank, box in enumerate(source):
        cut(total, box).add_(cut(whole(rank), box))
    return cut(total, target[index])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_translate_and_back(size: int) -> None:
    answers = run_ranks(run_all, Grid((("branch", size),)))
    for name, (source, target) in layouts(size).items():
        for index, answer in enumerate(answers):
            y, gradient, calls = answer[name]
            assert torch.equal(y, summed(source, target, index)), f"{name} at {index}"
            assert torch.equal(gradient, summed(target, source, index)), f"{name} at {index}, backward"
            others = [m for m in plan_translation(source, target) if m.sender == index != m.receiver]
            assert calls == ({("branch", "send"): len(others)} if others else {})
