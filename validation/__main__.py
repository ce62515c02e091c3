"""`make validate`: predicted against published, a table a paper, and a line a set of public rows.

`python -m validation [PAPER or SET ...] [--json FILE] [--page FILE] [--rows]` ends with 1 if a paper's mean error is
above the limit in docs/validation.md, or if a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from validation import axonn, branches, megatron, replicas, tesseract
from validation.case import Finding
from validation.paper import Paper, load_paper
from validation.public import judge, load_sets
from validation.report import Result, show, show_sets, summary
from validation.scatter import write_page

COMPARE: dict[str, Callable[[Paper], Finding]] = {
    "tesseract": tesseract.compare,
    "axonn": axonn.compare,
    "megatron-sc21": megatron.compare_2021,
    "megatron-2019": megatron.compare_2019,
    "super": branches.compare,
    "bai": replicas.compare,
}
"""The comparison of each paper, by the name of the paper's file."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against published results.")
    sets = load_sets()
    names = [*COMPARE, *sets]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all of them")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--page", type=Path, help="write a page with a scatter a set of public rows there")
    parser.add_argument("--rows", action="store_true", help="print every public row")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such paper or set; valid: {', '.join(names)}")
    asked = arguments.names or names
    results = []
    for name in (name for name in asked if name in COMPARE):
        paper = load_paper(name)
        unfitted = COMPARE[name](load_paper(name, fitted=False)).mean_error if paper.has_fit else None
        results.append(Result(paper, COMPARE[name](paper), unfitted))
        show(results[-1])
    if results:
        summary(results)
    judged = [judge(name, sets[name]) for name in asked if name in sets]
    show_sets(judged, rows=arguments.rows)
    if arguments.json:
        found: dict[str, Any] = {one.paper.name: asdict(one.finding) | {"unfitted": one.unfitted} for one in results}
        found |= {one.name: [asdict(row) for row in one.rows] for one in judged}
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.page:
        write_page(judged, arguments.page)
    sys.exit(not all(one.holds for one in results))


if __name__ == "__main__":
    main()
