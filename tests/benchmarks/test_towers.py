"""The benchmark of two towers counts the numbers of docs/towers.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def test_towers_send_the_bytes_of_the_page(tmp_path: Path) -> None:
    """Both columns of the page's table are right; the example's strategies are registered before the first config."""
    file = tmp_path / "towers.json"
    words = [sys.executable, "-m", "benchmarks.towers", "--only", "bytes", "--json", str(file)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    rows = {row["layout"]: row for row in json.loads(file.read_text())["bytes"]}
    page = (ROOT / "docs/towers.md").read_text()
    assert len(rows) == 3
    for name, shown in (("one rank", "0"), ("rows on 2", "25,851.9"), ("towers on 2", "32.8")):
        sent = sum(rows[name][kind] for kind in ("tower", "rows", "gradients"))
        assert f"{sent:,.1f}".removesuffix(".0") == shown
        assert f"| {rows[name]['parameters']:,} | {shown} |" in page
