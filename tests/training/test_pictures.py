"""Pictures of losses from metrics.jsonl, also from a file cut short by a kill; and of timelines."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from meshwright.ranks.errors import DataError
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.schedule import GPIPE, MESSAGE_DRIVEN, ScheduleRule
from meshwright.strategies.pipeline.span import Span, Timeline
from meshwright.training.pictures import draw_loss, draw_timelines, smoothed


def metrics(path: Path, steps: int) -> Path:
    lines = [{"step": step, "loss": 8.0 / step} for step in range(1, steps + 1)]
    lines[-1]["validation_loss"] = 1.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def size_of(picture: Path) -> tuple[int, int]:
    """Return width and height in pixels from the PNG's header."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.parametrize("steps", [1, 5, 500])
def test_a_picture_of_one_run(tmp_path: Path, steps: int) -> None:
    draw_loss(metrics(tmp_path / "metrics.jsonl", steps), tmp_path / "loss.png")
    width, height = size_of(tmp_path / "loss.png")
    assert width > height > 300


def test_a_smoothed_loss_lies_on_the_curve_that_it_smooths() -> None:
    """A falling curve is smoothed without a shift, also at both ends. A step without a finite loss is skipped."""
    line = [8.0 - step / 100 for step in range(200)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([*line[:50], math.inf, math.nan, *line[52:]]) == pytest.approx(line)
    noisy = [value + (-1) ** step for step, value in enumerate(line)]
    assert smoothed(noisy) == pytest.approx(line, abs=0.5)


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


def timeline(rule: ScheduleRule, num_stages: int = 3) -> Timeline:
    return simulate(num_stages, 4, rule, lambda stage, task: 1.0, lambda a, b, message: 0.25)


def test_a_panel_a_timeline_and_a_row_a_stage(tmp_path: Path) -> None:
    draw_timelines({"one": timeline(GPIPE)}, tmp_path / "new" / "one.png")
    draw_timelines({"one": timeline(GPIPE), "two": timeline(MESSAGE_DRIVEN)}, tmp_path / "two.png", "forward passes")
    draw_timelines({"one": timeline(GPIPE, 8)}, tmp_path / "tall.png")
    one, two, tall = (size_of(tmp_path / name)[1] for name in ("new/one.png", "two.png", "tall.png"))
    assert one < two
    assert one < tall


def test_phases_are_drawn(tmp_path: Path) -> None:
    tasks = timeline(GPIPE)
    with_phase = Timeline(3, (*tasks.spans, Span(0, "optimizer", "optimizer", 12.0, 13.0)))
    draw_timelines({"step": tasks}, tmp_path / "tasks.png")
    draw_timelines({"step": with_phase}, tmp_path / "phase.png")
    assert (tmp_path / "tasks.png").read_bytes() != (tmp_path / "phase.png").read_bytes()


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no spans to draw in .*x\.png$"):
        draw_timelines({}, tmp_path / "x.png")
    with pytest.raises(DataError, match=r"no spans to draw in .*x\.png; empty has none"):
        draw_timelines({"full": timeline(GPIPE), "empty": Timeline(1, ())}, tmp_path / "x.png")
