"""The section of the data: two coloured shapes and a caption, drawn from the run's seed. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.data.section import DataSection, Lengths

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.data.files import ShowProgress


class Shapes(DataSection):
    """Images of two coloured shapes, and captions of 16 words."""

    kind: Literal["shapes"]
    gives: ClassVar[str] = "captioned images"
    opened_by: ClassVar[str] = "towers.shapes_samples:open_shapes"
    lengths: ClassVar[Lengths] = Lengths(16, 0)

    def prepare(self, config: Config, progress: ShowProgress) -> Path:
        """Prepare nothing: samples are drawn on reading."""
        return Path()

    def contents(self, folder: Path) -> object:
        return ["shapes", 1]
