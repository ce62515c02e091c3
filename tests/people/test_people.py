"""Every case of the tables, in a separate folder."""

from pathlib import Path

import pytest

from tests.people.case import Case
from tests.people.tables import DOCS, all_cases, pages


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.slow else []) for case in all_cases()],
)
def test_case(case: Case, tmp_path: Path) -> None:
    outcome = case.run(tmp_path)
    assert outcome.holds, f"{case.right}\nwas wanted; printed was\n{outcome.got}"


def test_the_pages_have_every_report() -> None:
    assert {name: (DOCS / name).read_text(encoding="utf-8") for name in pages()} == pages()
