"""One thing has one name: the second table of docs/glossary.md, compared with the words that users read.

These are the names of config fields and of options, the texts of errors, the help, and the fields' descriptions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from meshwright.cli import app
from meshwright.configs import SCHEMA
from meshwright.planner.plan.cluster_topic import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
TABLE = "## One thing, one name"


def rows() -> list[tuple[str, list[str]]]:
    """Return each name, with the words that are not used for the same thing."""
    lines = (ROOT / "docs/glossary.md").read_text().split(TABLE, 1)[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return [(name, [word.strip() for word in other.split(",")]) for name, _, other in cells[1:]]


def uses(word: str, text: str) -> bool:
    """Return whether a text, or a name in parts joined by "_", "-" or ".", has the word or the word's plural."""
    plain = re.sub(r"[_.\-]", " ", text)
    return re.search(rf"\b{re.escape(re.sub(r'[_.-]', ' ', word))}(?:s|es)?\b", plain, re.IGNORECASE) is not None


def error_texts(source: str) -> Iterator[str]:
    """Yield the texts in `raise` statements and in calls of an error's `of`."""
    for node in ast.walk(ast.parse(source)):
        named = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error.of")
        if isinstance(node, ast.Raise) or named:
            yield from (
                each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def fields(node: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each field of a JSON schema."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict) and isinstance(node.get("properties"), dict):
        for name, field in node["properties"].items():
            yield name, field.get("description", "")
    for each in inner:
        yield from fields(each)


def options(command: Any) -> Iterator[str]:
    """Yield the names and the help of a command's options, and of all commands in a group."""
    yield command.help or ""
    for option in command.params:
        yield from (*option.opts, getattr(option, "help", None) or "")
    if isinstance(command, typer.core.TyperGroup):
        for inner in command.commands.values():
            yield from options(inner)


@cache
def said() -> frozenset[str]:
    """Return all words that users read."""
    schema = json.loads(SCHEMA.read_text())
    texts = {text for pair in fields(schema) for text in pair}
    texts |= {text for section in SECTIONS.values() for name, field in section.model_fields.items()
              for text in (name, field.alias or "", field.description or "")}  # fmt: skip
    texts |= set(options(get_command(app)))
    for path in (ROOT / "meshwright").rglob("*.py"):
        if "foreign" not in path.parts:  # foreign/ has other programs' words
            texts |= set(error_texts(path.read_text()))
    return frozenset(texts)


def test_all_kinds_of_words_are_read() -> None:
    assert len(said()) > 1000
    assert {"ranks_per_node", "--sequence", "has a part without a width", "bandwidth"} <= said()


@pytest.mark.parametrize("name, others", rows())
def test_a_thing_has_one_name(name: str, others: list[str]) -> None:
    assert any(uses(name, text) for text in said()), f"no text says {name}"
    found = {other: sorted(text for text in said() if uses(other, text)) for other in others}
    assert {other: texts for other, texts in found.items() if texts} == {}, f"the glossary calls this {name}"


def test_no_word_names_two_things() -> None:
    names = [name for name, _ in rows()]
    others = [other for _, words in rows() for other in words]
    assert len(names) >= 15
    assert len({*names, *others}) == len(names) + len(others)


@pytest.mark.parametrize(
    "text, found",
    [
        ("--micro-batch", True), ("batch.micro_batch", True), ("is no number of micro-batches", True),
        ("has 3 microbatches", False), ("Micro batch", True), ("a micro, batched", False),
    ],
)  # fmt: skip
def test_a_second_name_is_found(text: str, *, found: bool) -> None:
    assert uses("micro-batch", text) is found


def test_texts_of_errors_are_found() -> None:
    source = '''def f(x):
    """a doc"""
    raise ValueError(f"{x} is gone") from None
ConfigError.of("one", x, "two")
y = "no"
'''
    assert list(error_texts(source)) == [" is gone", "one", "two"]
