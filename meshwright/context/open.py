"""A rank's context, as the config says: opened, and attached to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from meshwright.context.context import WHOLE_SEQUENCES, Context
from meshwright.registry import load_entry

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.ranks.mesh import Mesh

EXACT_HEADS = "meshwright.bits.assembly:heads_of"
"""The entry of the room of equal bits, which a run without cuts does not import."""


class Attends(Protocol):
    """A model of tokens that may attend to tokens of other ranks."""

    def attend_in(self, context: Context) -> None:
        """Let a context cut batches and read other ranks' tokens."""


def attach(config: Config, mesh: Mesh, model: Attends) -> None:
    """Let a model attend in this rank's context."""
    model.attend_in(open_context(config, mesh))


def open_context(config: Config, mesh: Mesh) -> Context:
    """Return this rank's context: its tokens of each sequence, and how attention reads the tokens of other ranks."""
    context = config.layout.context
    if context.size == 1 and not config.bits.cuts:
        return WHOLE_SEQUENCES
    strategy, exact = context.strategy, config.bits.cuts
    entry = strategy.layout_free if exact else strategy.context
    opened = Context() if context.size == 1 else cast(Context, load_entry(entry)(mesh))
    if exact:
        opened.attend_by(load_entry(EXACT_HEADS)(config, mesh))
    return opened
