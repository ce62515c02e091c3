"""docs/reliability*.md name a test for each promise: each named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("reliability*.md")))


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", PAGE)
    assert len(named) > 100
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or (name and name not in functions_of(ROOT / file))
    ]
    assert missing == []


def test_every_row_names_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert [row for row in rows if "tests/" not in row.split(" | ")[-1] and "by hand" not in row] == []
