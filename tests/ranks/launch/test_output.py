"""A run goes on without a display, if the display breaks or was never there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshwright.ranks.streams import PatientStream
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import lines_of, make_corpus, make_text, tree_for


@pytest.mark.parametrize("kind", ["closed pipe", "full disk"])
def test_a_stream_that_breaks_falls_silent(kind: str) -> None:
    """The stream drops the text written after the break, and the text still buffered at the break."""
    if kind == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(writer, "w") as broken:
        stream = PatientStream(broken)
        for _ in range(3):
            assert stream.write("x" * 100_000) == 100_000
            stream.flush()
        assert Path(f"/proc/self/fd/{stream.fileno()}").readlink() == Path(os.devnull)


def train(folder: Path, redirections: str) -> int:
    """Run one rank from a shell with these redirections of output; return the exit code."""
    tree = tree_for(make_corpus(folder), layout={"transport": "torch"}, batch={"global": 4}, steps=2)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    words = [sys.executable, "-m", "meshwright.cli", "train", str(folder / "run.yaml"), "--out", str(folder / "out")]
    return subprocess.run(["bash", "-c", f"{' '.join(words)} {redirections}"], timeout=PATIENCE_SECONDS).returncode


@pytest.mark.parametrize(
    "redirections",
    [
        ">/dev/full 2>/dev/full",
        pytest.param(">&- 2>&-", marks=pytest.mark.long),
        pytest.param("2>&1 | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}", marks=pytest.mark.long),
    ],
)
def test_training_goes_on_without_a_display(tmp_path: Path, redirections: str) -> None:
    assert train(tmp_path, redirections) == 0
    assert [line["step"] for line in lines_of(tmp_path / "out")] == [1, 2]
    assert (tmp_path / "out" / "checkpoints" / "step-2").is_dir()


@pytest.mark.parametrize("variable, where", [("HOME", "/proc"), ("MESHWRIGHT_CACHE", "/proc/nowhere")])
def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path, variable: str, where: str) -> None:
    """No user can write in /proc, not even root."""
    tree = tree_for(make_text(tmp_path), layout={"transport": "torch"}, batch={"global": 4}, steps=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = [
        sys.executable,
        "-m",
        "meshwright.cli",
        "train",
        str(tmp_path / "run.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    kept = {name: value for name, value in os.environ.items() if name not in ("MESHWRIGHT_CACHE", "XDG_CACHE_HOME")}
    answer = subprocess.run(
        words, env=kept | {variable: where}, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert answer.returncode == 1
    (line,) = answer.stderr.strip().splitlines()
    assert where in line
    assert "MESHWRIGHT_CACHE names another folder" in line
