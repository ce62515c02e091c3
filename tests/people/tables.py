"""The tables of cases: each module `cases_*.py` of this folder has a list CASES."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.people.case import Case

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "people.md": (
        "Reports of users, and the case for each",
        "missing keys with null",
        ("chat", "config", "data", "say"),
    ),
    "people_clusters.md": (
        "Reports of operators and strangers' folders",
        "the same script is submitted again",
        ("door", "ops", "pages"),
    ),
}
"""Each page of docs/: title, words of a report, and the modules `cases_*.py`."""

HEAD = """
Is a fault that others reported still there? Run its cases by words of the report:

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
    parts.append("| report | right |\n|---|---|")
    rows: dict[str, dict[str, None]] = {}
    for case in module.CASES:
        rows.setdefault(case.report, {})[cell(case.right)] = None
    parts += [f"| {cell(report)} | {'; '.join(rights)} |" for report, rights in rows.items()]
    return "\n".join([*parts, ""])


def cell(text: str) -> str:
    """Return a text as a cell of a markdown table: on one line, letter by letter."""
    plain = text.rstrip(".").replace("\n", "\\n").replace("|", "\\|").replace("`", "'")
    return plain.replace("<", "&lt;").replace("[", "\\[")


def all_cases() -> list[Case]:
    cases: list[Case] = [case for module in modules() for case in module.CASES]
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return cases
