"""A rank's context, opened as the config says."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from meshwright.compute.context.context import WHOLE_SEQUENCES, Context, WidenedHeads
from meshwright.config.registry import load_entry

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.ranks.mesh import Mesh

EXACT_HEADS = "meshwright.compute.bits.assembly:heads_of"
"""The entry of the room of equal bits, which a run without cuts does not import."""


def open_context(config: Config, mesh: Mesh) -> Context:
    """Return this rank's context: the rank's tokens of each sequence, and attention to the tokens of other ranks."""
    context = config.layout.context
    strategy, exact, widens = context.strategy, config.bits.cuts, config.precision.widens
    if context.size == 1 and not exact and not widens:
        return WHOLE_SEQUENCES
    entry = strategy.layout_free if exact else strategy.context
    opened = Context() if context.size == 1 else cast(Context, load_entry(entry)(mesh))
    if exact:
        opened.attend_by(load_entry(EXACT_HEADS)(config, mesh))
    elif widens:
        opened.attend_by(WidenedHeads())
    return opened
