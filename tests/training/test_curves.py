"""Pictures of losses: drawn from metrics.jsonl, also from one that a kill cut short."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from meshwright.errors import DataError
from meshwright.training.pictures import draw_loss


def metrics(path: Path, steps: int) -> Path:
    lines = [{"step": step, "loss": 8.0 / step} for step in range(1, steps + 1)]
    lines[-1]["validation_loss"] = 1.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height in pixels, from the PNG's header."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.parametrize("steps", [1, 5, 500])
def test_a_picture_of_one_run(tmp_path: Path, steps: int) -> None:
    draw_loss(metrics(tmp_path / "metrics.jsonl", steps), tmp_path / "loss.png")
    width, height = size_of(tmp_path / "loss.png")
    assert width > height > 300


def test_another_loss_makes_another_picture(tmp_path: Path) -> None:
    draw_loss(metrics(tmp_path / "a.jsonl", 5), tmp_path / "a.png")
    draw_loss(metrics(tmp_path / "b.jsonl", 9), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", 5)
    draw_loss(path, tmp_path / "whole.png")
    path.write_text(path.read_text() + '{"step": 6, "lo')
    draw_loss(path, tmp_path / "cut.png")
    assert (tmp_path / "whole.png").read_bytes() == (tmp_path / "cut.png").read_bytes()


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        draw_loss(tmp_path / "nowhere.jsonl", tmp_path / "loss.png")
