"""The data section of spans. No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshwright.data.section import SENTINELS, Lengths
from meshwright.data.spans_section import span_lengths
from meshwright.data.text_section import MixedSection


class SpanData(MixedSection):
    """Spans cut out of a text, to be written by an encoder-decoder."""

    kind: Literal["spans"]
    gives: ClassVar[str] = "sequences"
    sentinels: ClassVar[int] = SENTINELS
    samples_by: ClassVar[str] = "meshwright.data.spans:span_samples"

    @property
    def lengths(self) -> Lengths:
        return span_lengths(self.sequence)
