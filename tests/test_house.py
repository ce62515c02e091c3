"""The rules of the house that a count can hold: the sizes of its two halves, the glossary's length."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GLOSSARY_ROWS = 30


def test_core_and_tools_keep_to_their_budgets(house_lines: dict[str, tuple[int, int]]) -> None:
    assert {part: lines for part, (lines, budget) in house_lines.items() if lines > budget} == {}


def test_the_glossary_is_short() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= GLOSSARY_ROWS, f"{len(rows) - 1} coined words"
