"""`make validate`: predicted against published, a table a paper.

python -m validation [PAPER ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from validation import axonn, branches, megatron, replicas, tesseract
from validation.case import Finding
from validation.paper import Paper, load_paper
from validation.report import show, summary

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
    found = {}
    for name in arguments.papers or COMPARE:
        paper = load_paper(name)
        found[name] = COMPARE[name](paper)
        show(paper, found[name])
    summary(found)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1))


if __name__ == "__main__":
    main()
