"""The modules of a run's layers that are not in graphs under `compile: blocks` (graphs.py), by config. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.config import Config


def attention_outside(config: Config) -> str | None:
    """Return the reason that attention is not compiled; None if it is compiled."""
    layout = config.layout
    if layout.context.size > 1:
        return f"over {layout.context.size} ranks"
    if config.data.separate:
        return "document by document"
    if config.memory.policy.attention:
        return f"which memory.recompute={config.memory.recompute} computes again"
    if config.precision.widens:
        return "in float32 of halves"
    if layout.tensor.axes and config.model.dropout:
        return "with dropout masks of each rank"
    return None


def outside_of_graphs(config: Config) -> Iterator[str]:
    """Yield the modules that are not compiled, each with the reason."""
    tensor = config.layout.tensor
    if tensor.axes:
        yield f"layers that layout.tensor.kind={tensor.kind} cuts"
    if (reason := attention_outside(config)) is not None:
        yield f"attention {reason}"
    if any(map(config.model.has_experts, range(config.model.num_blocks))):
        yield "experts"
    yield from config.model.not_in_graphs
