"""A family is a folder: without this folder and the registry's lines, the rest of the package is unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families.removal import PACKAGE, REST
from tests.patience import PATIENCE_SECONDS

FAMILIES = sorted(path.parent.name for path in PACKAGE.glob("families/*/__init__.py"))


NEEDED = ("gpt", "seq2seq")
"""The default family, and the family that other folders use most; the others run with --long."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", [name if name in NEEDED else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_the_rest_goes_on_without_a_family(family: str, tmp_path: Path) -> None:
    """All other modules are imported, each name in a text exists, and a run of another family is trained."""
    copy = tmp_path / "meshwright"
    shutil.copytree(PACKAGE, copy)  # with bytecode, which is matched by the files' times
    shutil.rmtree(copy / "families" / family)
    registry = copy / "config/registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    kept = [line for line in lines if f'"meshwright.families.{family}.' not in line]
    assert len(kept) < len(lines), "a family that no line of the registry names"
    registry.write_text("".join(kept))
    script = tmp_path / "rest.py"
    script.write_text(REST)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (Path(told["file"]).parent, told["steps"]) == (copy, 2)
    removed = {line.split('"')[1] for line in lines if f'"meshwright.families.{family}.' in line}
    assert not removed & set(told["models"])
