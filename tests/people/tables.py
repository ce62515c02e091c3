"""The tables of cases: each module `cases_*.py` of this folder has a list CASES."""

from __future__ import annotations

from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from tests.people.case import Case

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "people.md": ("Reports of users, and the case for each", "chat: null keys", ("chat", "config", "data", "say")),
    "people_clusters.md": ("Reports of operators and strangers' folders", "sbatch twice", ("door", "ops", "pages")),
}
"""Each page of docs/: title, an example of a case, and the modules `cases_*.py`."""

HEAD = """
Is a fault that others reported still there? Run its cases by the last column:

```sh
python -m tests.people "{example}"
```

The command prints the right answer next to the printed one; without a name all cases run. `make test` runs some of
each table, `make test-long` all. `python -m tests.people --pages` writes these pages.
"""


def modules() -> list[ModuleType]:
    return [import_module(f"tests.people.{path.stem}") for path in sorted(Path(__file__).parent.glob("cases_*.py"))]


def pages() -> dict[str, str]:
    """Return the pages of docs/ by name: a section for each module, a row for each report."""
    sections = {module.__name__.rpartition("cases_")[2]: section(module) for module in modules()}
    assert sorted(sections) == sorted(part for *_, parts in PAGES.values() for part in parts)
    return {
        name: f"# {title}\n{HEAD.format(example=example)}\n" + "\n".join(sections[part] for part in parts)
        for name, (title, example, parts) in PAGES.items()
    }


def section(module: ModuleType) -> str:
    """Return the table of a module's cases."""
    parts = [f"## {(module.__doc__ or '').strip().splitlines()[0].rstrip('.')}\n"]
    parts.append("| report | right | cases |\n|---|---|---|")
    rows: dict[str, dict[str, str]] = {}
    for case in module.CASES:
        rows.setdefault(case.report, {})[case.name] = case.right
    for report, rights in rows.items():
        answers = "; ".join(dict.fromkeys(map(cell, rights.values())))
        parts.append(f"| {cell(report)} | {answers} | {selection([*rights])} |")
    return "\n".join([*parts, ""])


def cell(text: str) -> str:
    """Return a text as a cell of a markdown table: on one line, letter by letter."""
    plain = text.rstrip(".").replace("\n", "\\n").replace("|", "\\|").replace("`", "'")
    return plain.replace("<", "&lt;").replace("[", "\\[")


def selection(names: list[str]) -> str:
    """Return the words that select a row's cases: one or two names, or common first words and their number."""
    columns = zip(*(name.split(" ") for name in names), strict=False)
    common = " ".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
    if len(names) < 3 or not common:
        return ", ".join(f"`{quoted(name)}`" for name in names)
    return f"`{quoted(common.rstrip(':,'))}` ({len(names)})"


def quoted(name: str) -> str:
    """Return a case's name as code in a cell."""
    return name.replace("\n", "\\n").replace("|", "\\|").replace("`", "'")


def all_cases() -> list[Case]:
    cases: list[Case] = [case for module in modules() for case in module.CASES]
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return cases
