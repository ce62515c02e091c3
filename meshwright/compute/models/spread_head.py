"""The work of one pipeline stage if the head's classes are cut over all stages (pipeline/spread_head.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compute.model import HEAD, Batch, Chunk, Crossing, Hidden, Pieces, Scales
from meshwright.compute.models.chain import Chain, ChainPart


class SpreadHead(ChainPart):
    """A stage's layers, its part of the head, or on the last stage both.

    Args:
        chain: The stage's chain.
        stages: Number of all stages.
        states: A meta tensor with the shape and dtype of the head's input, [B, T, H].
        layers: Whether this piece runs the stage's layers.
        head: Whether this piece runs the stage's part of the head.
    """

    def __init__(self, chain: Chain, stages: int, states: Tensor, *, layers: bool, head: bool) -> None:
        super().__init__(chain, chain.chunk if layers else Chunk((), False, False, chain.chunk.head_over))
        self.stages, self.states, self.layers, self.head = stages, states, layers, head

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Pieces:
        hidden = self.hidden_states(batch, incoming) if self.layers else ()
        if not self.head:
            return hidden
        rows, *each = self.states.shape
        taken = *[0] * (self.stages - 1), rows
        if self.layers:
            # One copy for each stage, this one included: autograd sums the gradients of all copies.
            copies = hidden[0].repeat(self.stages, *[1] * len(each))
            (h,) = yield Crossing(copies, (rows,) * self.stages, taken)
        else:
            device = next(iter(batch.values())).device
            nothing = torch.empty(0, *each, dtype=self.states.dtype, device=device, requires_grad=True)
            (h,) = yield Crossing(nothing, (0,) * self.stages, taken)
        return (self.chain.run_part(HEAD, self.chain.loss, h, batch, scales),)


def with_spread_head(chain: Chain, stages: int, states: Tensor, *, last: bool) -> list[SpreadHead]:
    """Return the pieces of one stage: layers, then a part of the head; the last stage has both in one piece.

    Args:
        chain: The stage's chain.
        stages: Number of all stages.
        states: A meta tensor with the shape and dtype of the head's input, [B, T, H].
        last: True on the last stage.
    """
    whole = SpreadHead(chain, stages, states, layers=True, head=last)
    return [whole] if last else [whole, SpreadHead(chain, stages, states, layers=False, head=True)]
