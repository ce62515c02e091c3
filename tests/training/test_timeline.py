"""Pictures of timelines."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from meshwright.errors import DataError
from meshwright.pipeline.clock import simulate
from meshwright.pipeline.schedule import GPIPE, MESSAGE_DRIVEN, ScheduleRule
from meshwright.pipeline.span import Timeline, phase_span
from meshwright.training.pictures import draw_timelines


def timeline(rule: ScheduleRule, num_stages: int = 3) -> Timeline:
    return simulate(num_stages, 4, rule, lambda stage, task: 1.0, lambda a, b, message: 0.25)


def height_of(picture: Path) -> int:
    """In pixels, from the PNG's header."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int(struct.unpack(">II", head[16:24])[1])


def test_a_panel_a_timeline_and_a_row_a_stage(tmp_path: Path) -> None:
    draw_timelines({"one": timeline(GPIPE)}, tmp_path / "new" / "one.png")
    draw_timelines({"one": timeline(GPIPE), "two": timeline(MESSAGE_DRIVEN)}, tmp_path / "two.png", "forward passes")
    draw_timelines({"one": timeline(GPIPE, 8)}, tmp_path / "tall.png")
    one, two, tall = (height_of(tmp_path / name) for name in ("new/one.png", "two.png", "tall.png"))
    assert one < two
    assert one < tall


def test_phases_are_drawn(tmp_path: Path) -> None:
    tasks = timeline(GPIPE)
    with_phase = Timeline(3, (*tasks.spans, phase_span(0, "optimizer", 12.0, 13.0)))
    draw_timelines({"step": tasks}, tmp_path / "tasks.png")
    draw_timelines({"step": with_phase}, tmp_path / "phase.png")
    assert (tmp_path / "tasks.png").read_bytes() != (tmp_path / "phase.png").read_bytes()


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no spans to draw in .*x\.png$"):
        draw_timelines({}, tmp_path / "x.png")
    with pytest.raises(DataError, match=r"no spans to draw in .*x\.png; empty has none"):
        draw_timelines({"full": timeline(GPIPE), "empty": Timeline(1, ())}, tmp_path / "x.png")
