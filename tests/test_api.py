"""docs/api.md, run as it stands; and what the package's names cost before they are used."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import ConfigError
from tests.patience import PATIENCE_SECONDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.]+)\n")


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    script = []
    for block in BLOCK.findall(PAGE.read_text()):
        named = FILE.match(block)
        if named:
            (tmp_path / named[1]).write_text(block)
        else:
            script.append(block)
    (tmp_path / "text.txt").write_text("a rank is a process, and a process is a rank.\n" * 400)
    body = textwrap.indent("\n".join(script), "    ")
    (tmp_path / "page.py").write_text(f'if __name__ == "__main__":\n{body}')
    ran = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr


def test_every_name_is_on_the_page_and_there() -> None:
    assert len(mw.__all__) <= 12
    for name in mw.__all__:
        assert f"`mw.{name}" in PAGE.read_text(), name
        assert getattr(mw, name) is not None
    assert set(mw.__all__) <= set(dir(mw))
    with pytest.raises(AttributeError, match="module meshwright has no attribute trian"):
        mw.trian  # noqa: B018


def test_names_survive_each_other_s_imports() -> None:
    """A name that were a module's too would become the module once that is imported."""
    assert callable(mw.train)
    import meshwright.training.job  # noqa: F401

    assert all(callable(vars(mw).get(name, mw.train)) for name in mw.__all__ if name != "launch")


def test_configs_and_their_mistakes_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, meshwright as mw\n"
        "config = mw.load({'layout': {'data': {'size': 2}}}, ['steps=3'])\n"
        "print(config.steps, 'torch' in sys.modules)\n"
    )
    assert run_python(code, tmp_path).stdout == "3 False\n"


def test_layouts_of_two_tasks_are_not_compared(tmp_path: Path) -> None:
    configs = {"a": mw.load({"seed": 1}), "b": mw.load({"seed": 2})}
    with pytest.raises(ConfigError, match="b: seed=2 is not the run's, and layouts are compared on one task; valid: 1"):
        mw.compare(configs, tmp_path / "out")
