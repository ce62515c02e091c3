"""SECURITY.md names a test for each sentence that holds: each named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what holds")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_a_sentence_has_its_test(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
    assert named, "a promise without a test"
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert functions if not function else function in functions, f"{file} has no {function}"


@pytest.mark.parametrize("words", re.findall(r"test_case` \(([\w ]+)\)", PAGE))
def test_the_cases_that_it_names_are_there(words: str) -> None:
    from tests.people.cases_door import CASES

    assert [case for case in CASES if words in case.name]
