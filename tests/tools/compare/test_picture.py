"""Pictures of comparisons."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from meshwright.ranks.errors import DataError
from meshwright.tools.compare.picture import Bar, Panel, draw_comparison

LOSSES = {"a": (5.0, 4.0), "b": (5.0, float("nan")), "c": (5.0, 4.000001)}


def height_of(picture: Path) -> int:
    """Return the height in pixels, from the PNG's header."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int(struct.unpack(">II", head[16:24])[1])


def test_a_bar_a_layout(tmp_path: Path) -> None:
    bars = {"a": Bar(3.0, 2.0, 2.5, 4.0), "b": Bar(0.0, 0.0), "c": Bar(1.0)}
    draw_comparison([Panel("A step", "ms", bars), Panel("Sent", "MB", bars)], LOSSES, tmp_path / "new" / "three.png")
    draw_comparison([Panel("A step", "ms", {"a": Bar(1.0)})], {"a": (5.0, 4.0)}, tmp_path / "one.png")
    assert height_of(tmp_path / "one.png") < height_of(tmp_path / "new" / "three.png")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no layouts to draw"):
        draw_comparison([], {}, tmp_path / "none.png")
