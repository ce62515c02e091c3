"""A family is a folder: without it, and without its lines of the registry, everything else is as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"
FAMILIES = sorted(path.parent.name for path in PACKAGE.glob("families/*/__init__.py"))

REST = """
import importlib, json, pkgutil, re
from pathlib import Path
from typer.testing import CliRunner
import meshwright as mw
from meshwright.cli import app
from meshwright.config.load import read_yaml
from meshwright.configs import shipped
from meshwright.errors import MeshwrightError
from meshwright.registry import OURS, entries, load_entry

for module in pkgutil.walk_packages(mw.__path__, "meshwright."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except MeshwrightError as error:  # an extra's module, where the extra is not here
        assert "is not installed" in str(error), error
for group in OURS:
    entries(group)
for path in Path(mw.__file__).parent.rglob("*.py"):
    for value in re.findall(r'"(meshwright(?:[.]\\w+)+:\\w+)"', path.read_text()):
        load_entry(value)
for path in shipped("models").values():
    tree = read_yaml(path)
    assert entries("models")[tree.get("family", "gpt2")].model_validate(tree).hidden
for name in shipped("runs"):
    assert mw.load(name).steps
for words in (["config"], ["config", "model"], ["config", "data"], ["config", "--schema"]):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception
models = {
    "gpt2": {"layers": 1, "hidden": 8, "heads": 2, "positions": 8, "vocabulary": 257},
    "llama": {"layers": 1, "hidden": 8, "heads": 2, "key_value_heads": 1, "positions": 8, "vocabulary": 257},
}
family, model = next((family, model) for family, model in models.items() if family in entries("models"))
Path("text.txt").write_text("A text of some words to learn by heart.\\n" * 20)
tree = {"model": {"family": family, **model}, "data": {"kind": "text", "source": "text.txt", "sequence": 8}, "steps": 2}
tree |= {"batch": {"global": 4}, "layout": {"data": {"size": 2}, "transport": "threads"}, "device": "cpu", "threads": 1}
tree |= {"metrics": {"sinks": []}, "compile": "none"}
mw.train(mw.load(tree), "out")
print(json.dumps({"file": mw.__file__, "steps": len(mw.history("out")), "models": list(entries("models"))}))
"""


NEEDED = ("gpt", "seq2seq")
"""The default, and the one of which other rooms know most; the others run with --long."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", [name if name in NEEDED else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_the_rest_goes_on_without_a_family(family: str, tmp_path: Path) -> None:
    """Every other module is imported, all that is named as text is there, and a run of another family is trained."""
    copy = tmp_path / "meshwright"
    shutil.copytree(PACKAGE, copy)  # with its bytecode, which is known by the files' times
    shutil.rmtree(copy / "families" / family)
    registry = copy / "registry.py"
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
