"""The lengths of sources and targets that are made by cutting spans out of a text.

T5's spans (Raffel et al., 2020, section 3.3.3): 15 % of a window of L tokens are cut out, in spans of 3 on average. L
is the largest length with source and target within `data.sequence`; the target is about a fifth as long as the source.
"""

from __future__ import annotations

from meshwright.data.section import BUCKET_MULTIPLE, SENTINELS, Lengths
from meshwright.ranks.errors import ConfigError

CUT_SHARE, MEAN_SPAN = 0.15, 3


class Window:
    """A text of `text` tokens; `cut` tokens are removed, in `spans` spans."""

    def __init__(self, text: int) -> None:
        self.text = text
        self.cut = max(1, round(CUT_SHARE * text))
        self.spans = max(1, round(self.cut / MEAN_SPAN))
        self.lengths = Lengths(text - self.cut + self.spans + 1, self.cut + self.spans + 1)
        """Tokens of source and target, with sentinels and end."""


def window_of(sequence: int, sentinels: int) -> Window:
    """Return the largest window with source and target within `sequence` tokens. Raises ConfigError if none fits."""
    if max(Window(2).lengths) > sequence:
        rule = "has no room for a text and its spans"
        raise ConfigError.of("data.sequence", sequence, rule, f"{max(Window(2).lengths)} or more")
    window = Window(2)
    # Step by step: lengths are rounded, so no formula gives the window of a sequence.
    while max(Window(window.text + 1).lengths) <= sequence:
        window = Window(window.text + 1)
        if window.spans > sentinels:
            rule = f"holds more spans than there are sentinels, {sentinels}"
            raise ConfigError.of("data.sequence", sequence, rule, f"{max(window.lengths) - 1} or less")
    return window


def span_lengths(sequence: int) -> Lengths:
    """Return the padded lengths of sources and targets. A target's length is a multiple of 8, like a bucket's edge.

    Raises ConfigError as window_of.
    """
    target = window_of(sequence, SENTINELS).lengths.target
    return Lengths(sequence, min(sequence, -(-target // BUCKET_MULTIPLE) * BUCKET_MULTIPLE))
