"""Without matplotlib and tensorboard, a run goes on and names the extra; a command that must draw refuses at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.config import parse_run
from meshwright.output.drawing import PictureError, new_figure, require_matplotlib
from meshwright.training.sinks import absent_sinks, require_sinks
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import make_corpus, tree_for

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("matplotlib", "tensorboard")
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from meshwright.cli import main
main()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line without these packages: ranks are threads of the same process."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tree = tree_for(make_corpus(tmp_path), layout={"data": {"size": 2}, "transport": "threads"}, steps=2)
    tree["metrics"] = {"sinks": ["tensorboard"]}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    return tmp_path


def test_a_run_goes_on_without_pictures_and_names_the_extras(folder: Path) -> None:
    ran = run(folder, "train", "run.yaml", "--out", "out")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "warning: no tensorboard: tensorboard is not installed (pip install 'meshwright[tensorboard]')" in ran.stdout
    assert "loss.png is not drawn: a picture needs matplotlib, which is not installed: pip install 'mesh" in ran.stdout
    assert ran.stdout.rstrip().endswith("metrics.jsonl")
    assert len((folder / "out/metrics.jsonl").read_text().splitlines()) == 2
    assert not (folder / "out/loss.png").exists()
    assert not (folder / "out/tensorboard").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words",
    [
        ("train", "run.yaml", "--trace", "1", "--out", "out"),
        ("compare", "run.yaml", "--layouts", "run.yaml", "--out", "out"),
        ("scale", "run.yaml", "--cluster", "dgx-a100", "--devices", "2", "--out", "out"),
        ("plan", "run.yaml", "--cluster", "dgx-a100", "--devices", "2", "--trace", "trace.json"),
    ],
    ids=lambda words: words[0],
)
def test_what_must_draw_refuses_before_it_begins(folder: Path, words: tuple[str, ...]) -> None:
    ran = run(folder, *words)
    assert ran.returncode == 1
    assert "needs matplotlib, which is not installed: pip install 'meshwright[pictures]'" in ran.stderr
    assert not (folder / "out").exists()
    assert not (folder / "plan.yaml").exists()


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.output.drawing.find_spec", lambda name: None)
    with pytest.raises(PictureError, match=r"--trace needs matplotlib, .*: pip install 'meshwright\[pictures\]'"):
        require_matplotlib("--trace")
    with pytest.raises(PictureError):
        new_figure(1, 1, 100)


def test_a_sink_that_was_asked_for_by_name_alone_is_not_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default sink is optional; wandb and the others are refused (tests/training/test_sinks.py)."""
    monkeypatch.setattr("meshwright.training.sinks.find_spec", lambda name: None)
    metrics = parse_run({}, []).metrics
    require_sinks(metrics)
    assert set(absent_sinks(metrics)) == {"tensorboard"}
