"""Files that commands write: no existing file is replaced unasked, and no message advises to delete a user's file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

from meshwright.cli import app
from meshwright.output.outputs import free_path, new_path, refuse_existing
from meshwright.ranks.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"

ADVICE = re.compile(r"\b(remove|delete|unlink|rm|erase)\b(?!d)\s+(it|that|this|them|the|one|\{|-)", re.IGNORECASE)

REPLACED = {("calibrate", "out"): "cluster.yaml"}
"""Defaults that a command may replace: calibrate measures its earlier output again, and reads no file."""


def texts_of(path: Path) -> list[tuple[int, str]]:
    """Return every text of a module except docstrings; an f-string is one text with {} for each value."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            found.append((node.lineno, "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inner:
            found.append((node.lineno, node.value))
    return found


def test_no_message_advises_to_delete_a_user_s_file() -> None:
    texts = [(path, line, text) for path in PACKAGE.rglob("*.py") for line, text in texts_of(path)]
    assert len(texts) > 10_000
    advising = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path, line, text in texts
        # A script's comments and commands are no advice: only a text for a person has a blank before the word.
        if ADVICE.search(text) and not text.startswith("#")
    ]
    assert advising == []


def test_the_rule_of_advice_sees_the_old_ones() -> None:
    for old in ("another file, or remove it", "mend or remove it", "give another folder, or remove that one",
                "or remove {} to go on with that one", "delete the file"):  # fmt: skip
        assert ADVICE.search(old), old


def test_a_default_output_equals_no_input() -> None:
    """Commands choose a free name; a command with a fixed default name could replace an input."""
    fixed = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.name in ("out", "to", "page", "trace", "save") and parameter.default not in (None, False):
                fixed[name, parameter.name] = str(parameter.default)
    assert fixed == REPLACED


def test_a_free_path_is_numbered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "plan.yaml"
    assert new_path(asked) == asked
    assert capsys.readouterr().err == ""
    asked.write_text("mine")
    (tmp_path / "plan-2.yaml").symlink_to("nowhere")  # a link to a missing file is a user's file, too
    assert free_path(asked) == tmp_path / "plan-3.yaml"
    assert new_path(asked) == tmp_path / "plan-3.yaml"
    assert capsys.readouterr().err == f"{asked} is there already: this command writes {tmp_path}/plan-3.yaml\n"
    with pytest.raises(ConfigError, match=r"--out=.*plan\.yaml is there already; valid: .*plan-3\.yaml$"):
        refuse_existing("--out", asked)
    refuse_existing("--out", None)
    refuse_existing("--out", tmp_path / "other.yaml")
