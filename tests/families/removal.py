"""A script that imports and uses the rest of the package after a folder was deleted."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"

REST = """
import importlib, json, pkgutil, re
from pathlib import Path
from typer.testing import CliRunner
import meshwright as mw
from meshwright.cli import app
from meshwright.config.load import read_yaml
from meshwright.configs import shipped
from meshwright.ranks.errors import MeshwrightError
from meshwright.config.registry import OURS, entries, load_entry

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
