"""The quickstart's sample: names that no character has are marked."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "examples/new_names.py"


def test_new_names_have_a_star_and_a_last_line_that_was_cut_is_left_out() -> None:
    marked = runpy.run_path(str(SCRIPT))["marked"]
    sample = "LATIN SMALL LETTER A\nLATIN SMALL LETTER T WITH NO SENSE\n\nCOMBINING BREVE\nCOMBINING DOU"
    assert marked(sample).splitlines() == [
        "  LATIN SMALL LETTER A",
        "* LATIN SMALL LETTER T WITH NO SENSE",
        "  COMBINING BREVE",
        "",
        "1 of 3 names (*) are new: Unicode has no such character.",
    ]
