"""Each feature's lines, held to the table in features.yaml: a row may not grow without a word about its worth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypedDict

import pytest
import yaml

PACKAGE = Path(__file__).resolve().parent.parent / "meshwright"


class Feature(TypedDict):
    worth: str
    lines: int
    modules: list[str]


@cache
def features() -> dict[str, Feature]:
    table: dict[str, Feature] = yaml.safe_load(Path(__file__).with_name("features.yaml").read_text())
    return table


def owner(module: str, table: Mapping[str, Feature]) -> str | None:
    """The row whose modules name this one, or the folder nearest above it."""
    named = [(len(place), name) for name, feature in table.items() for place in feature["modules"]
             if module == place or module.startswith(f"{place}/")]  # fmt: skip
    return max(named)[1] if named else None


@cache
def lines_by_row() -> dict[str | None, int]:
    """Lines of Python by row; None: of modules that no row names."""
    table = features()
    lines: dict[str | None, int] = {}
    for path in PACKAGE.rglob("*.py"):
        row = owner(str(path.relative_to(PACKAGE)), table)
        lines[row] = lines.get(row, 0) + len(path.read_text().splitlines())
    return lines


def test_every_module_belongs_to_a_feature() -> None:
    table = features()
    assert None not in lines_by_row()
    places = [place for feature in table.values() for place in feature["modules"]]
    assert len(places) == len(set(places)), "a place in two rows"
    assert [place for place in places if not (PACKAGE / place).exists()] == []


@pytest.mark.parametrize("row", features())
def test_a_feature_has_no_more_lines_than_its_row_says(row: str) -> None:
    feature = features()[row]
    assert lines_by_row()[row] <= feature["lines"], f"{row} grew: say in the commit what for, or what shrinks"
    assert feature["worth"]


def test_a_module_that_nobody_names_is_seen() -> None:
    assert owner("novel/thing.py", features()) is None
    assert owner("tools/plan/scale.py", features()) == "scaling curves"
    assert owner("tools/plan/search.py", features()) == "the planner"
