"""Files per change: each folder here is a change that people ask for, as edits of a copy of the package, and its test.

`change.yaml` has `adds` (path: text) and `edits` (path: a list of old and new texts, each there once); `try.py` is run
next to `trained.py` in an empty folder, with the changed copy as the package. The test counts the files of the package
that a change adds or edits. A bound in FILES may only fall.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_SECONDS

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "meshwright"

FILES = {
    "adapter": 3,
    "collective": 3,
    "engine": 2,
    "family": 3,
    "fp8": 2,
    "metric": 2,
    "optimizer": 2,
    "policy": 2,
    "schedule": 2,
    "sync": 3,
}
AIMS = {
    "adapter": 4,
    "collective": 3,
    "engine": 3,
    "family": 5,
    "fp8": 2,
    "metric": 3,
    "optimizer": 2,
    "policy": 2,
    "schedule": 3,
    "sync": 3,
}


def change_of(name: str) -> dict[str, Any]:
    change: dict[str, Any] = yaml.safe_load((HERE / name / "change.yaml").read_text())
    return {"adds": {}, "edits": {}} | change


def test_each_folder_is_counted() -> None:
    assert {path.parent.name for path in HERE.glob("*/change.yaml")} == set(FILES) == set(AIMS)


@pytest.mark.parametrize("name", FILES)
def test_a_change_touches_few_files(name: str) -> None:
    change = change_of(name)
    assert not set(change["adds"]) & set(change["edits"])
    assert len(change["adds"]) + len(change["edits"]) == FILES[name], "a bound follows a change that needs fewer"


@pytest.mark.parametrize("name", FILES)
def test_a_change_does_what_it_says(name: str, tmp_path: Path) -> None:
    change = change_of(name)
    copy, folder = tmp_path / "changed" / "meshwright", tmp_path / "work"
    shutil.copytree(PACKAGE, copy)  # with its bytecode, which is known by the files' times
    folder.mkdir()
    for path, text in change["adds"].items():
        assert not (copy / path).exists(), f"{path} is there already"
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text(text)
    for path, edits in change["edits"].items():
        text = (copy / path).read_text()
        for edit in edits:
            assert text.count(edit["old"]) == 1, f"{path} has changed: find another place in {name}/change.yaml"
            text = text.replace(edit["old"], edit["new"])
        (copy / path).write_text(text)
    for file in (HERE / name / "try.py", HERE / "trained.py"):
        shutil.copy(file, folder)
    environment = os.environ | {"PYTHONPATH": str(copy.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "try.py"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(copy), "the package that was tried is the changed one"
