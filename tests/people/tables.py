"""The tables of cases: each module `cases_*.py` of this folder has a list CASES."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.people.case import Case

HEAD = """# Reports of users, and the case for each

Each row is a public report, or a habit of public users, with the right answer. `python -m tests.people` runs every
case from files to the printed line and prints the right value next to the printed one; `python -m tests.people WORD`
runs the cases whose name has the word. `make test` runs one case or more of each table, `make test-long` all.
`python -m tests.people --page` prints this page.
"""


def modules() -> list[ModuleType]:
    return [import_module(f"tests.people.{path.stem}") for path in sorted(Path(__file__).parent.glob("cases_*.py"))]


def page() -> str:
    """Return docs/people.md: a section for each module, a row for each report."""
    parts = [HEAD]
    for module in modules():
        parts.append(f"## {(module.__doc__ or '').strip().splitlines()[0].rstrip('.')}\n")
        parts.append("| report | right | cases |\n|---|---|---|")
        rows: dict[tuple[str, str], list[str]] = {}
        for case in module.CASES:
            rows.setdefault((case.report, case.right), []).append(case.name)
        parts += [
            f"| {cell(report)} | {cell(right)} | {', '.join(f'`{quoted(name)}`' for name in names)} |"
            for (report, right), names in rows.items()
        ]
        parts.append("")
    return "\n".join(parts)


def cell(text: str) -> str:
    """Return a text as a cell of a markdown table: on one line, letter by letter."""
    plain = text.rstrip(".").replace("\n", "\\n").replace("|", "\\|").replace("`", "'")
    return plain.replace("<", "&lt;").replace("[", "\\[")


def quoted(name: str) -> str:
    """Return a case's name as code in a cell."""
    return name.replace("\n", "\\n").replace("|", "\\|").replace("`", "'")


def all_cases() -> list[Case]:
    cases: list[Case] = [case for module in modules() for case in module.CASES]
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return cases
