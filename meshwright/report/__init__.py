"""What people look at after a run: pictures drawn from its metrics."""

from meshwright.report.curves import draw_curves, draw_loss

__all__ = ["draw_curves", "draw_loss"]
