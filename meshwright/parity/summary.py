"""Results for a pull request: markdown for a job's summary, and GitHub's annotations at the lines of checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.parity.check import ParityResult
from meshwright.ranks.streams import say


def append_summary(results: Sequence[ParityResult], path: Path, command: str) -> None:
    """Append a table of the results to a file of markdown, which GitHub shows as the job's summary."""
    lines = [f"### `{command}`", "", "| check | | verdict |", "|---|---|---|"]
    for result in results:
        mark = "equal" if result.holds else "**differs**"
        told = f"{result.verdict}. {result.remedy}" if result.remedy else result.verdict
        # On one line of a table, without markdown's and HTML's marks.
        plain = told.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("*", "&#42;")
        lines.append(f"| `{result.check.title}` | {mark} | {' '.join(plain.split())} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, "", ""]))


def annotate(results: Sequence[ParityResult]) -> None:
    """Print GitHub's command for an annotation of each result that differs, at the line of the check's function."""
    for result in results:
        if not result.holds:
            location = f"file={of_a_property(place_of(result.check.file))},line={max(1, result.check.line)}"
            told = f"{result.verdict}\n{result.remedy}".strip()
            say(f"::error {location},title={of_a_property(result.check.title)}::{of_a_message(told)}")


def place_of(file: Path) -> str:
    """Return the file relative to the current folder, if inside: GitHub shows annotations only for such paths."""
    whole, here = file.resolve(), Path.cwd()
    return whole.relative_to(here).as_posix() if whole.is_relative_to(here) else str(whole)


def of_a_message(text: str) -> str:
    """Escape a text as a message of GitHub's workflow commands."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def of_a_property(text: str) -> str:
    """Escape a text as a property of GitHub's workflow commands."""
    return of_a_message(text).replace(":", "%3A").replace(",", "%2C")
