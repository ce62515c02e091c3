"""Runs `meshwright eval` in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from meshwright.cli import app


def run(*words: object) -> str:
    """Return the command's stdout."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def run_json(*words: object) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(run(*words, "--json"))
    return read
