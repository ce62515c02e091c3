"""The figures of all pictures. matplotlib is imported where one is drawn: a run needs none, and may be without it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from meshwright.ranks.errors import MeshwrightError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PictureError(MeshwrightError):
    """A picture that cannot be drawn, since matplotlib is not installed."""


def require_matplotlib(picture: str) -> None:
    """Raise PictureError where matplotlib is not installed. Asked before long work whose result is drawn."""
    if find_spec("matplotlib") is None:
        raise PictureError(f"{picture} needs matplotlib, which is not installed: pip install 'meshwright[pictures]'")


def new_figure(width_inches: float, height_inches: float, dpi: int) -> Figure:
    """A figure of its own: no state is shared with another drawing, nor with a notebook."""
    require_matplotlib("a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
