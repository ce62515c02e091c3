"""Equal bits are a folder: without this folder, except for the section, all other code works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.families.removal import PACKAGE, REST
from tests.patience import PATIENCE_SECONDS

KEPT = {"__init__.py", "section.py"}
LACKING = """
from meshwright.config.registry import load_entry
from meshwright.training.rank_model import EXACT_ARITHMETIC
try:
    load_entry(EXACT_ARITHMETIC)
except ModuleNotFoundError:
    print(json.dumps({"lacks": EXACT_ARITHMETIC}))
"""


def test_the_rest_goes_on_without_equal_bits(tmp_path: Path) -> None:
    """Every other module is imported, everything named as text outside of the folder exists, and a run is trained."""
    copy = tmp_path / "meshwright"
    shutil.copytree(PACKAGE, copy)  # with bytecode, which Python matches by the files' times
    removed = [path for path in (copy / "compute/bits").glob("*.py") if path.name not in KEPT]
    assert len(removed) > 8
    for path in removed:
        path.unlink()
    shutil.rmtree(copy / "compute/bits/__pycache__", ignore_errors=True)
    script = tmp_path / "rest.py"
    loads = "        load_entry(value)\n"
    assert REST.count(loads) == 1
    script.write_text(
        REST.replace(loads, '        value.startswith("meshwright.compute.bits.") or load_entry(value)\n') + LACKING
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran, lacks = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (Path(ran["file"]).parent, ran["steps"]) == (copy, 2)
    assert lacks["lacks"].startswith("meshwright.compute.bits.")


def test_nothing_outside_names_what_the_room_is_made_of() -> None:
    named = {"Blocks(", "SampleGrains", "HeadParts", "ExactProducts", "BlockDropout", "PartHead", "PartNorm"}
    outside = [path for path in PACKAGE.rglob("*.py") if "bits" not in path.relative_to(PACKAGE).parts]
    told = {
        f"{path.relative_to(PACKAGE)} imports it" for path in outside for line in path.read_text().splitlines()
        if line.startswith("from meshwright.compute.bits.") and "bits.section import" not in line
    }  # fmt: skip
    told |= {
        f"{path.relative_to(PACKAGE)}: {word}" for path in outside for word in named
        if word in path.read_text()
    }  # fmt: skip
    assert told == set()
