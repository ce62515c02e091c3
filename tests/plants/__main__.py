"""`python -m tests.plants`: plant each mistake into a copy of the repository, and write which tests found the mistake.

`NAME ...`: plants with one of these words in the name; `--jobs`: plants at a time; `--long`: all tests, not only `make
test`. found.json holds the answers, and README.md the table. The exit code is 1 if no test finds a plant.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.plants.plant import FOUND, Plant, find, page_with, plants, read_found

PAGE = Path("tests/plants/README.md")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = [plant for plant in plants() if not options.names or any(word in plant.name for word in options.names)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="meshwright-plants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        answers = pool.map(partial(find, Path(folder), long=options.long), chosen)
        for plant, answer in zip(chosen, answers, strict=True):
            missed += not answer
            print(f"{plant.name}: {told(answer)}", flush=True)
            keep(plant, answer)
    return int(missed > 0)


def told(answer: dict[str, int]) -> str:
    return ", ".join(f"{file} {cases}" for file, cases in answer.items()) or "NOT FOUND"


def keep(plant: Plant, answer: dict[str, int]) -> None:
    """Write a plant's answer into found.json, in the plants' order, and the page anew."""
    answers = read_found() | {plant.name: answer}
    FOUND.write_text(
        json.dumps({one.name: answers[one.name] for one in plants() if one.name in answers}, indent=1) + "\n"
    )
    PAGE.write_text(page_with(PAGE.read_text(), plants(), answers))


if __name__ == "__main__":
    sys.exit(main())
