"""What tests of steps share: a microbatch's passes by themselves."""

from __future__ import annotations

from torch import Tensor

from meshwright.build import Parts
from meshwright.model import Batch, Scales


def forward_and_backward(parts: Parts, batch: Batch, scales: Scales, *, final: bool = True) -> Tensor:
    """A microbatch of a run of one stage; its scaled loss. `final`: of the step's last, whose gradients are summed."""
    stage = parts.pipeline.stage
    parts.strategy.expect(final)
    (loss,) = stage.forward(0, (), batch, scales)
    stage.backward(0, (), defers=False)
    return loss
