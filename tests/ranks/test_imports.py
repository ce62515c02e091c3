"""A process that Meshwright starts imports nothing from the current folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.ranks.imports import leave_current_folder, leave_unnamed_folder, python_words

PACKAGE = Path(__file__).resolve().parents[2]
PLANTED = 'open({mark!r}, "a").write(__file__ + "\\n")\nraise SystemExit("planted")\n'


def plant(folder: Path) -> Path:
    """Write modules named as the standard library's, torch's and Meshwright's; return the path of the modules' log."""
    mark = folder.parent / "mark"
    for name in ("random", "statistics", "torch", "queue", "secrets", "tempfile", "numpy", "ctypes"):
        (folder / f"{name}.py").write_text(PLANTED.format(mark=str(mark)))
    return mark


@pytest.mark.parametrize("module", ["meshwright", "meshwright.cli"])
def test_minus_m_leaves_the_current_folder(module: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    mark = plant(folder)
    ended = subprocess.run(
        [sys.executable, "-m", module, "explain", "quickstart"],
        cwd=folder,
        env={"PYTHONPATH": str(PACKAGE), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, mark.exists()) == (0, False), ended.stderr


def test_a_python_of_ours_has_no_current_folder(tmp_path: Path) -> None:
    mark = plant(tmp_path)
    words = python_words("-c", "import random, json, sys; print(json.dumps(sys.path))")
    path = json.loads(subprocess.run(words, cwd=tmp_path, capture_output=True, check=True).stdout)
    assert str(tmp_path) not in path
    assert "" not in path
    assert not mark.exists()


@pytest.mark.parametrize(
    "argv, words, leaves",
    [
        (["-m"], ["python", "-m", "meshwright", "train"], True),
        (["-m"], ["python", "-um", "meshwright.cli"], True),
        (["-m"], ["python", "-m", "meshwright_tools"], False),
        (["/bin/tool"], ["python", "/bin/tool", "meshwright"], False),
    ],
)
def test_which_program_leaves_its_folder(
    argv: list[str], words: list[str], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "path", ["/here", "/here", "/lib"])  # twice, since PYTHONPATH names the folder as well
    leave_current_folder("meshwright")
    assert sys.path == (["/here", "/lib"] if leaves else ["/here", "/here", "/lib"])


def test_a_command_line_of_minus_c_leaves_the_empty_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/lib"])
    leave_unnamed_folder()
    leave_unnamed_folder()
    assert sys.path == ["/lib"]
