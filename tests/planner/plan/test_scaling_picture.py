"""Pictures of scaling."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.plan.scaling_picture import Line, draw_scaling
from meshwright.ranks.errors import DataError

STEEP = Line((4, 16, 64), (10.0, 38.0, 120.0), (1.0, 0.95, 0.75))
NOTHING = Line((), (), ())


def test_every_line_is_drawn(tmp_path: Path) -> None:
    draw_scaling({"data": STEEP}, tmp_path / "new" / "one.png", "title")
    draw_scaling({"data": STEEP, "megatron": Line((16,), (20.0,), (1.0,))}, tmp_path / "two.png", "title")
    draw_scaling({"data": STEEP, "tesseract": NOTHING}, tmp_path / "none.png", "title")
    one, two, none = ((tmp_path / name).read_bytes() for name in ("new/one.png", "two.png", "none.png"))
    assert one.startswith(b"\x89PNG")
    assert len({one, two, none}) == 3


def test_strategies_with_equal_points_are_one_line(tmp_path: Path) -> None:
    """A line under another line is not seen: the legend has both names at the visible line."""
    draw_scaling({"data": STEEP, "zero1": STEEP}, tmp_path / "equal.png", "title")
    draw_scaling({"data = zero1": STEEP}, tmp_path / "one.png", "title")
    assert (tmp_path / "equal.png").read_bytes() == (tmp_path / "one.png").read_bytes()


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no point to draw in .*x\.png$"):
        draw_scaling({"data": NOTHING}, tmp_path / "x.png", "title")
