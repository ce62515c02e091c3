"""The command and the plugin, on separate processes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from meshwright.parity.check import collect, grid_of
from meshwright.parity.compare import Row
from meshwright.parity.report import worst_row
from meshwright.ranks.errors import ConfigError
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
DDP = ROOT / "examples/parity/ddp.py"


def test_the_command_says_what_differs_and_where(tmp_path: Path) -> None:
    page = tmp_path / "parity.html"
    summary = tmp_path / "summary.md"
    command = [sys.executable, "-m", "meshwright", "parity", str(DDP), "--json", "--page", str(page)]
    command += ["--summary", str(summary)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT)
    assert ran.returncode == 1, ran.stderr
    told = json.loads(ran.stdout)
    right, wrong = told["checks"]
    assert right["holds"], right["verdict"]
    losses = [row for row in right["comparisons"] if row["kind"] == "loss"]
    assert max(row["error"] for row in losses) < 1e-14
    assert {"copy", "cut"} >= {module["output"]["kind"] for module in right["modules"]}
    assert wrong["finding"]["kind"] == "token counts"
    [marked] = re.findall(r'<tr class="first" id="first-2"><td title="([^"]+)"', page.read_text())
    assert marked == "(loss)", "a mean of means is no module's"
    assert "a mean of means" in page.read_text()
    assert f"| `{wrong['check']}[data2]` | **differs** | token counts at (loss)" in summary.read_text()


@pytest.mark.long
def test_pytest_collects_checks() -> None:
    installed = any(point.value == "meshwright.parity.plugin" for point in metadata.entry_points(group="pytest11"))
    loaded = [] if installed else ["-p", "meshwright.parity.plugin"]
    options = [*loaded, "-p", "no:cacheprovider", "--import-mode=prepend"]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(DDP)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert "a mean of means" in ran.stdout


def test_mistakes_are_said_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="has no check; valid: a function under"):
        collect(tmp_path / "none.py")
    with pytest.raises(ConfigError, match=r"ranks=3 cannot be cut into axes .*; valid: a multiple of 2"):
        grid_of(3, {"tp": 2})
    assert grid_of(4, {"tp": 2}) == (("data", 2), ("tp", 2))


def test_rounding_alone_stands_for_no_kind() -> None:
    """The gradient of a key's bias is rounding, with a relative error of 1 or more. A wrong row precedes all others."""
    bias, weight = Row("gradient", "k.bias", 1.5, 12.0), Row("gradient", "k.weight", 1e-16, 2e-15)
    assert worst_row([bias, weight]) == weight
    assert worst_row([bias]) == bias
    wrong, lost = Row("gradient", "v.weight", 1e-3, 2e-15), Row("gradient", "q.weight", math.nan, 2e-15)
    assert worst_row([bias, weight, wrong]) == wrong
    assert worst_row([wrong, lost, weight]) == lost
