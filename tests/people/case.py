"""A case: the reported fault, the right value, and a function that runs the command line in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 600


@dataclass(frozen=True)
class Outcome:
    got: str
    """The printed value or the last line of the refusal."""
    holds: bool


@dataclass(frozen=True)
class Case:
    name: str
    """Unique among all cases: `separate documents`."""
    report: str
    """The public report or habit, in one sentence."""
    right: str
    """The right value or refusal, in words."""
    run: Callable[[Path], Outcome]
    """Takes an empty folder."""
    slow: bool = False
    """Runs with `--long` alone under pytest: longer than five seconds, and similar to other cases."""


def meshwright(
    folder: Path, *words: str, env: Mapping[str, str] | None = None, timeout: float = PATIENCE_SECONDS
) -> tuple[int, str]:
    """Run `meshwright WORDS` in a folder.

    Returns:
        The exit code, and stdout with stderr.
    """
    command = [sys.executable, "-c", "from meshwright.cli import main; main()", *words]
    repository = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([repository, *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path, **(env or {})}, timeout=timeout,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return ended.returncode, ended.stdout.decode(errors="replace")


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
