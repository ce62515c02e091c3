"""SQuAD's official scores of known answers; the best span in windows that overlap."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.bert.evaluate_squad import Scored, answer_of, f1, normalised
from meshwright.families.bert.task_files import SquadQuestion
from meshwright.families.bert.tasks import squad_windows


@pytest.mark.parametrize(
    "given, wanted, exact, overlap",
    [
        ("The Denver Broncos!", "denver  broncos", 1, 1),
        ("Broncos", "Denver Broncos", 0, 2 / 3),
        ("in the year of 1066", "1066", 0, 2 / 5),
        ("a cat a cat", "cat cat dog", 0, 4 / 5),
        ("green", "red", 0, 0),
        ("", "", 1, 1),
        ("an", "the", 1, 1),
        ("", "red", 0, 0),
        ("U.S.", "us", 1, 1),
    ],
)
def test_official_rules(given: str, wanted: str, exact: float, overlap: float) -> None:
    assert (normalised(given) == normalised(wanted)) == exact
    assert f1(given, wanted) == pytest.approx(overlap)
    assert normalised(normalised(given)) == normalised(given)


PASSAGE = "one two three four five six"
ASKED = SquadQuestion("q", "?", PASSAGE, (("four", PASSAGE.index("four")),), "")


def scored(start: int, end: int, nothing: float = 0.0) -> list[Scored]:
    """Return windows of 12 characters, begun every 4, with the highest scores at `start` and `end` of the passage."""
    found = []
    for window in squad_windows(ASKED, byte_tokenizer(), 16, 4):
        scores = np.zeros((2, 16))
        for row, place in enumerate((start, end)):
            inside = place - window.begin
            if 0 <= inside < len(window.places):
                scores[row, window.shift + inside] = 10
        scores[:, 0] = nothing
        found.append(Scored(window, *scores))
    return found


def test_the_best_span_is_given() -> None:
    begin = PASSAGE.index("four")
    assert answer_of(ASKED, scored(begin, begin + 3), may_be_none=False) == "four"
    assert answer_of(ASKED, scored(begin, begin + 3, nothing=11), may_be_none=True) == ""
    assert answer_of(ASKED, scored(begin, begin + 3, nothing=9), may_be_none=True) == "four"
    backwards = answer_of(ASKED, scored(begin + 3, begin), may_be_none=False)
    assert backwards != "", "no span runs backwards; the next best is one"
    assert len(backwards) <= 12
