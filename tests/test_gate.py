"""The gate: CI runs `make check`, with the tests of `make test`."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commands(target: str) -> list[str]:
    """Return the commands that make would run for a target, without commands that install."""
    shown = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in shown.stdout.splitlines() if ".venv/bin/" in line and " -m pip " not in line]


def test_ci_checks_format_lint_types_and_then_tests() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make check"
    *checks, tests = commands("check")
    # Between these the rehearsal asks whether torch is built for CUDA, and if so runs with a CPU build.
    assert [check.split("/")[-1] for check in checks[:3]] == ["ruff format --check .", "ruff check .", "mypy"]
    assert all("torch.version.cuda" in check or "purelib" in check for check in checks[3:])
    assert len(checks) > 3
    assert [tests] == commands("test")
    assert "pytest" in tests
