"""Plain words: leaning words and pronouns of each room and page, held to bounds that only fall (tests/language.py)."""

from __future__ import annotations

from functools import cache

import pytest

from tests.language import (
    BOUNDS,
    NAMELESS,
    ROOT,
    Prose,
    Rates,
    counted,
    listed,
    lowered,
    measured,
    nameless,
    prose_of_page,
    prose_of_source,
)

rows = cache(measured)
REMEDY = "python -m tests.language"


def test_every_room_and_page_is_within_its_bounds() -> None:
    bounds = listed()
    assert len(rows()) > 60
    assert {
        "meshwright/compute",
        "examples/adopt",
        "examples/parity",
        "examples/towers",
        "benchmarks",
        "validation",
        "tests",
        "tests/compute",
    } <= set(rows())
    found = {}
    for name, prose in rows().items():
        allowed = bounds.get(name, BOUNDS)
        over = [
            f"{rate:.1f} {kind} per 1,000 words, at most {max(bound, own)}"
            for kind, rate, bound, own in zip(Rates._fields, prose.rates, BOUNDS, allowed, strict=True)
            if rate > max(bound, own)
        ]
        if over:
            found[name] = over
    assert found == {}, f"CONTRIBUTING.md has the rules; {REMEDY} prints all rates"


def test_a_row_that_meets_the_bounds_leaves_the_table() -> None:
    met = sorted(set(listed()) - set(lowered(listed(), rows())))
    assert met == [], f"within {BOUNDS}, or gone: {REMEDY} --lower removes these rows from tests/language.yaml"


def test_a_table_falls_and_never_rises() -> None:
    """A row's bound is the lower of the old bound and the rate, rounded up; a row within BOUNDS is left out."""
    old = {name: Rates(9.0, 20.0) for name in ("better", "worse", "plain", "gone")}
    now = {"better": Prose(1000, 7, 20), "worse": Prose(1000, 12, 30), "plain": Prose(1000, 5, 15)}
    assert lowered(old, now) == {"better": Rates(7.0, 20.0), "worse": Rates(9.0, 20.0)}
    assert lowered({"third": Rates(9.0, 9.0)}, {"third": Prose(300, 2, 3)}) == {"third": Rates(6.7, 9.0)}


@pytest.mark.parametrize(
    "text, leaning, pronouns",
    [
        ("Sends what the rank holds to those that wait.", 2, 0),
        ("The axis over which it sums, so many times as there are ranks.", 2, 1),
        ("A message comes, and its bytes stand beside their copies.", 3, 2),
        ("Whose turn? Nobody knows whoever\ncame apart.", 5, 0),
        ("Sends `what it holds` to the next stage. Somewhat later the item outcomes.", 0, 0),
        ("A tensor in\nwhich rows repeat.", 1, 0),
        ("As\n  many as ranks.", 1, 0),
    ],
)
def test_leaning_words_and_pronouns_are_counted(text: str, leaning: int, pronouns: int) -> None:
    assert counted(text)[1:] == (leaning, pronouns)


def test_prose_of_a_source_is_docstrings_and_comments() -> None:
    source = '''"""one of a module"""
SIZE = 2
"""two of a constant"""
TEXT = "no prose # no comment"  # three of a comment
URL = f"{SIZE}#{TEXT!r}"

class Layer:
    """four of a class"""

    width: int = 3
    """five of a field"""

    def forward(self):
        """six of a method"""
        if self.width:
            async def inner():
                """seven of a function in a branch"""
        raise ValueError("""no prose
# in a text""")
'''
    words = "one of a module two of a constant three of a comment four of a class five of a field six of a method"
    assert sorted(prose_of_source(source).split()) == sorted(f"{words} seven of a function in a branch".split())


def test_prose_of_a_page_has_no_code() -> None:
    assert prose_of_page("One.\n```sh\nwhat it is\n```\nTwo.").split() == ["One.", "Two."]


PUBLIC_ARGUMENTS = {"norm.kind", "parallel.part"}
"""Keywords of a kit's norm and of ParityJob, which programs of others pass."""


def test_variables_have_nouns_for_names() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "meshwright").rglob("*.py"))
        if (names := nameless(path.read_text()) - PUBLIC_ARGUMENTS)
    }
    assert found == {}, f"a noun says which thing it is; these words do not: {', '.join(sorted(NAMELESS))}"


def test_variables_of_all_forms_are_found() -> None:
    source = """
def f(own, /, one, *other, kept=1, **number):
    for place in one:
        with other as part:
            return [kind for kind in part if (own := kind)]

def g(x): return lambda kind: kind.part

class C:
    kind: str
    def h(self):
        match self.kind:
            case kept: self.number, place = kept, 1
"""
    assert nameless(source) == {
        *(f"f.{name}" for name in NAMELESS), "lambda.kind", "h.kept", "h.place",
    }  # fmt: skip
