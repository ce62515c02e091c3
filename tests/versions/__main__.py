"""Run the tests with this interpreter's releases, and print each broken promise of docs/reliability*.md.

    .venv-oldest/bin/python -m tests.versions [WORDS OF PYTEST ...]        (make test-versions)

A promise is a row of docs/reliability*.md. A promise breaks if a test in its row fails. A failed test that no row names
is printed by name. The exit code is pytest's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NAMED_TEST = re.compile(r"(tests/[\w/]+)(?:\.py)?(?:::(\w+))?")


def pages() -> str:
    """Return the text of all pages of promises."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("reliability*.md")))


def promises(page: str) -> list[tuple[str, set[tuple[str, str]]]]:
    """Return each row's promise with the tests that the row names, as (file, function); function "" is the file."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and (named := NAMED_TEST.findall(cells[-1])):
            rows.append((cells[0], {(file.removesuffix(".py"), function) for file, function in named}))
    return rows


def failures(report: str) -> set[tuple[str, str]]:
    """Return the failed tests of a JUnit report, as (file, function)."""
    failed = set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            function = re.split(r"[\[ ]", case.get("name", ""))[0]
            failed.add((case.get("classname", "").replace(".", "/"), function))
    return failed


def broken(failed: set[tuple[str, str]], page: str) -> tuple[list[str], set[tuple[str, str]]]:
    """Return the broken promises, and the failed tests that no promise names."""
    lost, unnamed = [], set(failed)
    for promise, tests in promises(page):
        hit = {(file, name) for file, name in failed for at, own in tests if covers(at, own, file, name)}
        if hit:
            lost.append(f"{promise}: {', '.join(sorted(f'{file}.py::{name}' for file, name in hit))}")
        unnamed -= hit
    return lost, unnamed


def covers(at: str, own: str, file: str, name: str) -> bool:
    """Return whether the reference `at::own` of the page names the test `file::name`; `at` may be a folder."""
    return (file == at or file.startswith(at.rstrip("/") + "/")) and own in ("", name)


def releases() -> str:
    """Return the installed release of each direct dependency."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(word).name for word in project["dependencies"]] + ["transformers"]
    return ", ".join(f"{name} {version(name)}" for name in names)


def main(words: list[str]) -> int:
    print(releases(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *words], cwd=ROOT).returncode
        failed = failures(report.read_text()) if report.exists() else set()
    lost, unnamed = broken(failed, pages())
    for line in lost:
        print(f"broken promise: {line}")
    for file, name in sorted(unnamed):
        print(f"failed, of no promise: {file}.py::{name}")
    print(f"{len(lost)} promises broken, {len(failed)} tests failed")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
