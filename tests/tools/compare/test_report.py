"""The terminal and the page have one table, also if no layout of a comparison has run."""

from __future__ import annotations

import pytest

from meshwright.tools.compare.report import render, times_table
from meshwright.tools.compare.result import Measurement
from tests.tools.compare.runs import comparison, contender, predicted, rank, run


def test_without_any_run(capsys: pytest.CaptureFixture[str]) -> None:
    failed = comparison(
        Measurement(contender("a"), failure="rank 0 was killed\nmore"),
        Measurement(contender("b"), failure="no memory"),
    )
    table = times_table(failed)
    assert table.best is None
    assert [[cell.text for cell in line[:3]] for line in table.lines] == [["a", "1", "failed"], ["b", "1", "failed"]]
    render(failed)
    assert "a failed: rank 0 was killed\n" in capsys.readouterr().out


def test_every_line_has_a_cell_for_every_column() -> None:
    fine = run((1, 1, 0.5, 0.5), (5.0, 4.0, 3.0, 2.0), [rank(0)])
    for foreseen in (None, predicted(0.6, (100, {"data": 4}))):
        table = times_table(
            comparison(Measurement(contender("a"), (fine,), foreseen), Measurement(contender("b"), failure="dead"))
        )
        assert {len(line) for line in table.lines} == {len(table.columns)}
        assert table.best == 0
