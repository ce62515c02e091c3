"""A proof's facts as YAML, and the steps of the GitHub Action in a runner's environment."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/parity_ci.md").read_text()
RIGHT = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1] + "\nimport beside\n"  # type: ignore[index]
WRONG = RIGHT.replace("DistributedDataParallel(job.copy())", "job.copy()")


@pytest.fixture
def checks(tmp_path: Path) -> Path:
    """Return a folder with a file of checks that hold, a file with a check that differs, and a module."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "beside.py").write_text("import numpy\n")
    return tmp_path


def run_parity(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "parity", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_a_certificate_says_what_was_proved(checks: Path) -> None:
    ran = run_parity(checks, "right.py", "--json", "--certificate", "cards/right.yaml")
    assert ran.returncode == 0, ran.stderr
    told = yaml.safe_load((checks / "cards/right.yaml").read_text())["parity"]
    [check] = told["checks"]
    [printed] = json.loads(ran.stdout)["checks"]
    assert (check["name"], check["axes"], check["precision"]) == ("ddp", {"data": 2}, "float64")
    assert sum(check["compared"].values()) == len(printed["comparisons"]) > 0
    assert check["compared"]["losses"] == 3
    assert 0 <= check["worst"]["error"] <= check["worst"]["allowed"] < 1e-13
    hashes = {name: hashlib.sha256((checks / name).read_bytes()).hexdigest() for name in ("beside.py", "right.py")}
    assert told["files"] == hashes, "the file of checks, and what it imports of its folder"
    assert told["libraries"].keys() == {"meshwright", "torch", "numpy"}
    assert told["libraries"]["numpy"] == version("numpy")
    assert told["command"].endswith("parity right.py --json --certificate cards/right.yaml")


def test_a_check_that_differs_leaves_no_certificate(checks: Path) -> None:
    (checks / "wrong.yaml").write_text("parity: earlier\n")
    ran = run_parity(checks, "wrong.py", "--certificate", "wrong.yaml")
    assert ran.returncode == 1
    assert "no certificate: a check differs" in ran.stderr
    [said] = [line for line in PAGE.splitlines() if line.startswith("ddp[data2]: ")]
    assert said in ran.stdout.splitlines()
    assert (checks / "wrong.yaml").read_text() == "parity: earlier\n"


def test_a_model_card_carries_a_certificate(checks: Path) -> None:
    """The reader of model cards reads the fields and writes the same fields again."""
    hub = pytest.importorskip("huggingface_hub")
    assert run_parity(checks, "right.py", "--certificate", "right.yaml").returncode == 0
    told = (checks / "right.yaml").read_text()
    card = hub.ModelCard(f"---\nlicense: mit\n{told}---\n# A model\n")
    assert card.data.to_dict()["parity"] == yaml.safe_load(told)["parity"]
    assert hub.ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_the_action_compares_all_files_and_tells_the_pull_request(checks: Path) -> None:
    """The step runs as in a runner: bash with -e and -o pipefail, inputs in place, files of the runner."""
    action = yaml.safe_load((ROOT / "packaging/parity/action.yml").read_text())
    used = yaml.safe_load((ROOT / "examples/github/parity.yml").read_text())["jobs"]["parity"]["steps"]
    [given] = [step["with"] for step in used if step.get("uses", "").endswith("packaging/parity")]
    assert given.keys() <= action["inputs"].keys()
    step = action["runs"]["steps"][1]
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()}
    inputs |= {"checks": "right.py wrong.py", "precision": "float32"}
    environment = {name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: inputs[m[1]], text)
                   for name, text in step["env"].items()}  # fmt: skip
    shim = checks / "bin/meshwright-parity"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m meshwright.parity "$@"\n')
    shim.chmod(0o755)
    environment |= {"GITHUB_STEP_SUMMARY": str(checks / "summary.md"), "PYTHONPATH": str(ROOT),
                    "PATH": f"{shim.parent}:{os.environ['PATH']}"}  # fmt: skip
    ran = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=checks,
        env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    line = WRONG.splitlines().index("@parity.check(ranks=2)") + 1
    assert f"::error file=wrong.py,line={line},title=ddp[data2]::" in ran.stdout
    assert "| `ddp[data2]` | equal |" in (checks / "summary.md").read_text()
    assert "| `ddp[data2]` | **differs** |" in (checks / "summary.md").read_text()
    made = {path.name for path in (checks / "parity").iterdir()}
    assert made == {"right.html", "right.yaml", "wrong.html"}
    assert yaml.safe_load((checks / "parity/right.yaml").read_text())["parity"]["checks"][0]["precision"] == "float32"
