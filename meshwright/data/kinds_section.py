"""The data sections of masked texts, of spans, and of images. No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshwright.data.section import DIGITS, SENTINELS, DataSection, Lengths, source_exists
from meshwright.data.spans_section import span_lengths
from meshwright.data.text_section import MixedSection
from meshwright.section import Rule


class MaskedData(MixedSection):
    """Two texts, of which some tokens are masked."""

    kind: Literal["masked"]
    gives: ClassVar[str] = "masked"
    samples_by: ClassVar[str] = "meshwright.data.masked:masked_samples"


class SpanData(MixedSection):
    """Spans cut out of a text, to be written by an encoder-decoder."""

    kind: Literal["spans"]
    gives: ClassVar[str] = "sequences"
    sentinels: ClassVar[int] = SENTINELS
    samples_by: ClassVar[str] = "meshwright.data.spans:span_samples"

    @property
    def lengths(self) -> Lengths:
        return span_lengths(self.sequence)


class ImageData(DataSection):
    """Images: digits, or a folder of class folders."""

    kind: Literal["images"]
    gives: ClassVar[str] = "images"
    prepared_by: ClassVar[str] = "meshwright.data.images:prepare_images"
    opened_by: ClassVar[str] = "meshwright.data.images:open_image_splits"
    source_names: ClassVar[tuple[str, ...]] = (DIGITS,)
    source_forms: ClassVar[str] = "a folder of class folders of jpg and png files"
    reads_folders_alone: ClassVar[bool] = True
    header: ClassVar[str] = "images.json"
    rules: ClassVar[tuple[Rule, ...]] = (source_exists,)
