"""A planted mistake, the run of tests that looks for the mistake, and the table of the findings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PLANTS, FOUND = (Path(__file__).with_name(name) for name in ("plants.yaml", "found.json"))
FUZZER = "tests/fuzz/test_fuzz.py"
LEFT_OUT = (".git", ".venv", "out", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis")
BEGIN, END = "<!-- plants: begin -->\n", "<!-- plants: end -->\n"


@dataclass(frozen=True)
class Plant:
    """A mistake and the tests that look for the mistake.

    Attributes:
        file: A path in the package.
        old: Text that is in `file` once.
        new: Text that replaces `old`.
        tests: Files and folders of tests that run.
        drawn: pytest's -k of cases of the fuzzer's fixed set, which run as well.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    drawn: str = ""

    def put(self, package: Path) -> None:
        """Plant the mistake into a copy of the package."""
        path = package / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: stands {text.count(self.old)} times in {self.file}"
        path.write_text(text.replace(self.old, self.new))


def plants() -> list[Plant]:
    return [Plant(**one | {"tests": tuple(one["tests"])}) for one in yaml.safe_load(PLANTS.read_text())]


def find(folder: Path, plant: Plant, *, long: bool = False) -> dict[str, int]:
    """Run the plant's tests on a copy of the repository with the plant; return the failed cases by test file, the most
    first. The copy is first on the path, of the tests' subprocesses as well."""
    copy = Path(shutil.copytree(REPOSITORY, folder / plant.name, ignore=shutil.ignore_patterns(*LEFT_OUT)))
    plant.put(copy / "meshwright")
    asked = [*plant.tests, *([FUZZER] if plant.drawn else [])]
    drawn = ["-k", f"not test_fuzz or (test_equals_one_device and ({plant.drawn}))"] if plant.drawn else []
    report = copy / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", "-o", "timeout=300", f"--junitxml={report}", *(["--long"] if long else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *drawn, *asked],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), f"{plant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    failed = Counter(
        str(case.get("classname")).replace(".", "/") + ".py"
        for case in xml.parse(report).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    )
    shutil.rmtree(copy)
    return dict(failed.most_common())


def read_found() -> dict[str, dict[str, int]]:
    """Return the failed cases by plant and test file."""
    found: dict[str, dict[str, int]] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    return found


def table(all_plants: Sequence[Plant], answers: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of tests/plants/README.md: a row a plant, with the rooms of tests that find the plant and the
    numbers of cases."""
    rows = ["| room | planted mistake | found by (cases) |", "|---|---|---|"]
    for plant in all_plants:
        by_room: Counter[str] = Counter()
        for file, cases in answers.get(plant.name, {}).items():
            by_room[room_of(file)] += cases
        told = ", ".join(f"{room} {cases}" for room, cases in by_room.most_common())
        rows.append(f"| {plant.room} | {plant.name} | {told} |")
    return "\n".join(rows) + "\n"


def room_of(file: str) -> str:
    """Return the folder of a test file below tests/, or the file's name without a folder."""
    inside = Path(file).relative_to("tests")
    return str(inside.parent) if inside.parent.name else inside.stem


def page_with(page: str, all_plants: Sequence[Plant], answers: Mapping[str, Mapping[str, int]]) -> str:
    """Return the page with the table of these answers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(all_plants, answers)}{END}{after}"
