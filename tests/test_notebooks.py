"""docs/notebooks: each runs from top to bottom, on threads as ranks; stored outputs are printed by the same cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent
BOOKS = sorted(path.stem for path in (ROOT / "docs/notebooks").glob("*.ipynb"))
QUICK = "parity"


def cells_of(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((ROOT / f"docs/notebooks/{name}.ipynb").read_text())["cells"]
    return cells


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.long) for name in BOOKS]
)
def test_a_notebook_runs(name: str) -> None:
    """A notebook runs in a new process, since a notebook changes the folder and registers strategies."""
    pytest.importorskip("matplotlib")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.run_notebook", f"docs/notebooks/{name}.ipynb"],
        cwd=ROOT,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_begins_with_what_it_shows_and_keeps_its_outputs(name: str) -> None:
    first, *rest = cells_of(name)
    assert first["cell_type"] == "markdown"
    assert "".join(first["source"]).startswith("# ")
    code = [cell for cell in rest if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    text = json.dumps([cell["outputs"] for cell in code])
    assert "/tmp/" not in text
    assert "/home/" not in text
