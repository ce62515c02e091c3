"""The data section of images. No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshwright.config.section import Rule
from meshwright.data.section import DIGITS, DataSection, source_exists


class ImageData(DataSection):
    """Images: digits, or a folder of class folders."""

    kind: Literal["images"]
    gives: ClassVar[str] = "images"
    prepared_by: ClassVar[str] = "meshwright.families.vision.images:prepare_images"
    opened_by: ClassVar[str] = "meshwright.families.vision.images:open_image_splits"
    source_names: ClassVar[tuple[str, ...]] = (DIGITS,)
    source_forms: ClassVar[str] = "a folder of class folders of jpg and png files"
    reads_folders_alone: ClassVar[bool] = True
    header: ClassVar[str] = "images.json"
    rules: ClassVar[tuple[Rule, ...]] = (source_exists,)
