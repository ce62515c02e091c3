"""The tables of cases: each module `cases_*.py` of this folder has a list CASES."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.people.case import Case


def all_cases() -> list[Case]:
    cases: list[Case] = []
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        cases += import_module(f"tests.people.{path.stem}").CASES
    names = [case.name for case in cases]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    return cases
