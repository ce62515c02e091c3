"""Rates of leaning words and pronouns in the repository's prose, by room of the package and by page.

    python -m tests.language            print the words of each room and page, and the rates per 1,000 words
    python -m tests.language --lower    write tests/language.yaml anew: bounds fall to the rates, and none rises

A leaning word leaves the reader to supply a noun, or gives a tensor a person's verb: `what`, `as many`, `of which`,
`comes`. Prose is the docstrings and comments of Python files, and the text of Markdown files without blocks of code.
Code in backticks is no prose.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import product
from math import ceil
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/language.yaml"

PREPOSITIONS = ["of", "in", "by", "over", "for", "at", "on", "from", "to", "with", "under"]
LEANING = re.compile(
    rf"\b(?:what|those|whose|nobody|whoever|beside|behind|alike|apart|(?:{'|'.join(PREPOSITIONS)})\s+which"
    r"|(?:so|as)\s+(?:many|much)|comes?|came|lies?|stands?|stood)\b",
    re.IGNORECASE,
)
PRONOUNS = re.compile(r"\b(?:its?|they|them|their)\b", re.IGNORECASE)

STRINGS_AND_COMMENTS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\''
    r'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#(?P<comment>[^\n]*)',
    re.DOTALL,
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


FOLDERS = ("meshwright", "docs", "skills", "examples", "benchmarks", "validation", "tests")
"""Folders with prose for readers."""
NAMELESS = frozenset(["own", "one", "other", "kept", "number", "place", "part", "kind"])
"""Names that say nothing of a variable: a noun says which thing it is (CONTRIBUTING.md)."""


class Rates(NamedTuple):
    """Words per 1,000 words of prose."""

    leaning: float
    pronouns: float


BOUNDS = Rates(5.0, 15.0)
"""The bounds of every room and page that tests/language.yaml does not list."""


class Prose(NamedTuple):
    """The words of a room or page, and the leaning words and pronouns among the words."""

    words: int
    leaning: int
    pronouns: int

    @property
    def rates(self) -> Rates:
        words = max(self.words, 1)
        return Rates(1000 * self.leaning / words, 1000 * self.pronouns / words)


def counted(text: str) -> Prose:
    """Count a text's words, without code in backticks."""
    text = re.sub(r"`[^`]*`", "", text)
    return Prose(len(text.split()), len(LEANING.findall(text)), len(PRONOUNS.findall(text)))


def nameless(source: str) -> set[str]:
    """Return the parameters and variables of functions with a name of NAMELESS, as `function.name`."""
    found: set[str] = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        arguments = function.args
        bound = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        bound |= {each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None}
        bound |= {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        bound |= {node.name for node in ast.walk(function) if isinstance(node, ast.MatchAs) and node.name}
        found |= {f"{getattr(function, 'name', 'lambda')}.{name}" for name in bound & NAMELESS}
    return found


def prose_of_page(text: str) -> str:
    """Return the text of a Markdown file without blocks of code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def prose_of_source(text: str) -> str:
    """Return the docstrings, the attributes' docstrings and the comments of a Python file."""
    comments = (found["comment"] for found in STRINGS_AND_COMMENTS.finditer(text))
    return "\n".join([*docstrings(ast.parse(text)), *(comment for comment in comments if comment)])


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings in a module or statement, at any depth. A function's body has no attributes' docstrings."""
    body: list[ast.stmt] = getattr(node, "body", [])
    if isinstance(node, DOCUMENTED):
        before = [None, *body]
        for first, statement in zip(before, body, strict=False):
            documents = first is None or (
                isinstance(node, ast.Module | ast.ClassDef) and isinstance(first, ast.Assign | ast.AnnAssign)
            )
            if documents and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield str(statement.value.value)
    for part in ("body", "orelse", "finalbody", "handlers"):
        for inner in getattr(node, part, ()):
            if isinstance(inner, ast.stmt | ast.ExceptHandler) and hasattr(inner, "body"):
                yield from docstrings(inner)


def room_of(path: Path) -> str:
    """Return the row of a file: a page itself; of a source its top folder, in families/ and tools/ the next one."""
    folders = path.relative_to(ROOT).parts
    if path.suffix == ".md":
        return "/".join(folders)
    if folders[0] in ("benchmarks", "validation") or (folders[0] == "tests" and len(folders) == 2):
        return folders[0]
    deep = len(folders) > 3 and folders[1] in ("families", "tools")
    return "/".join(folders[: 3 if deep else 2])


def files() -> Iterator[Path]:
    """Yield all files with prose for readers: sources, documents, skills, tests."""
    for folder, pattern in product(FOLDERS, ("*.py", "*.md")):
        yield from sorted((ROOT / folder).rglob(pattern))
    yield from (ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md"))


def measured() -> dict[str, Prose]:
    """Return the counted prose of each room and page."""
    rows: dict[str, Prose] = {}
    for path in files():
        text = path.read_text()
        prose = counted(prose_of_page(text) if path.suffix == ".md" else prose_of_source(text))
        before = rows.get(room_of(path), Prose(0, 0, 0))
        rows[room_of(path)] = Prose(*map(sum, zip(before, prose, strict=True)))
    return rows


def listed() -> dict[str, Rates]:
    """Return the bounds of rooms and pages above BOUNDS, from tests/language.yaml."""
    return {name: Rates(*rates) for name, rates in (yaml.safe_load(TABLE.read_text()) or {}).items()}


def lowered(old: dict[str, Rates], rows: dict[str, Prose]) -> dict[str, Rates]:
    """Return the bounds of rows still above BOUNDS: the rates rounded up, at most the old bounds."""
    bounds = {}
    for name, before in old.items():
        if name not in rows:
            continue
        now = Rates(*(min(old, ceil(10 * rate) / 10) for old, rate in zip(before, rows[name].rates, strict=True)))
        if now.leaning > BOUNDS.leaning or now.pronouns > BOUNDS.pronouns:
            bounds[name] = now
    return bounds


def main(words: list[str]) -> None:
    rows, bounds = measured(), listed()
    if words == ["--lower"]:
        head = "".join(line for line in TABLE.read_text().splitlines(keepends=True) if line.startswith("#"))
        lines = (f"{name}: [{own.leaning}, {own.pronouns}]\n" for name, own in sorted(lowered(bounds, rows).items()))
        TABLE.write_text(head + "".join(lines))
    else:
        print(
            f"{'':36} {'words':>7} {'leaning':>8} {'pronouns':>9}  per 1,000 words; * above {BOUNDS[0]} or {BOUNDS[1]}"
        )
        for name, prose in sorted(rows.items()):
            mark = "" if all(rate <= bound for rate, bound in zip(prose.rates, BOUNDS, strict=True)) else "  *"
            print(f"{name:36} {prose.words:7} {prose.rates.leaning:8.1f} {prose.rates.pronouns:9.1f}{mark}")


if __name__ == "__main__":
    main(sys.argv[1:])
