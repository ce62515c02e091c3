"""`make validate`: predicted against published, a table a paper.

`python -m validation [PAPER ...] [--json FILE]` ends with 1 where a paper's mean error is above the one that
docs/validation.md admits, or where a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from validation import axonn, branches, megatron, replicas, tesseract
from validation.case import Finding
from validation.paper import Paper, load_paper
from validation.report import Result, show, summary

COMPARE: dict[str, Callable[[Paper], Finding]] = {
    "tesseract": tesseract.compare,
    "axonn": axonn.compare,
    "megatron-sc21": megatron.compare_2021,
    "megatron-2019": megatron.compare_2019,
    "super": branches.compare,
    "bai": replicas.compare,
}
"""By the paper's file."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against published results.")
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(COMPARE)}; all of them")
    parser.add_argument("--json", type=Path, help="write all rows there")
    arguments = parser.parse_args()
    unknown = set(arguments.papers) - set(COMPARE)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such paper; valid: {', '.join(COMPARE)}")
    results = []
    for name in arguments.papers or COMPARE:
        paper = load_paper(name)
        unfitted = COMPARE[name](load_paper(name, fitted=False)).mean_error if paper.has_fit else None
        results.append(Result(paper, COMPARE[name](paper), unfitted))
        show(results[-1])
    summary(results)
    if arguments.json:
        found = {one.paper.name: asdict(one.finding) | {"unfitted": one.unfitted} for one in results}
        arguments.json.write_text(json.dumps(found, indent=1))
    sys.exit(not all(one.holds for one in results))


if __name__ == "__main__":
    main()
