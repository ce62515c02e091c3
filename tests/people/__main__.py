"""`python -m tests.people [WORD ...]`: every case, or each with a word in the name or the report, with the right value
next to the printed one. The exit code is 1 if a case fails. `--pages` writes docs/people*.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.people.tables import DOCS, all_cases, pages


def main(words: list[str]) -> int:
    if words == ["--pages"]:
        for name, text in pages().items():
            (DOCS / name).write_text(text, encoding="utf-8")
        return 0
    table = Table("case", "right", "printed", "holds")
    failed = 0
    cases = [
        case for case in all_cases() if not words or any(word in case.name or word in case.report for word in words)
    ]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            outcome = case.run(Path(folder))
        failed += not outcome.holds
        table.add_row(*map(Text, (case.name, case.right, outcome.got, "yes" if outcome.holds else "NO")))
        print(f"{'holds' if outcome.holds else 'FAILS'}  {case.name}", file=sys.stderr, flush=True)
    Console(width=160).print(table)
    print(f"{len(cases) - failed} of {len(cases)} hold")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
