"""Figures for all pictures. matplotlib is imported only for a drawing, since a run needs no picture."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from meshwright.ranks.errors import MeshwrightError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PictureError(MeshwrightError):
    """An error: a picture cannot be drawn, since matplotlib is not installed."""


def require_matplotlib(picture: str) -> None:
    """Raise PictureError if matplotlib is not installed. Called before long work with a drawn result."""
    if find_spec("matplotlib") is None:
        raise PictureError(f"{picture} needs matplotlib, which is not installed: pip install 'meshwright[pictures]'")


def new_figure(width_inches: float, height_inches: float, dpi: int) -> Figure:
    """Make a figure that shares no state with other drawings or a notebook."""
    require_matplotlib("a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
