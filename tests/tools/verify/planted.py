"""Workers of `verify` with a planted mistake."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

from meshwright.compute.bits.grains import SampleGrains
from meshwright.config import Config
from meshwright.config.schema import LossScale, Precision
from meshwright.ranks.launch import Rank
from meshwright.tools.verify.job import bits_rank, reference_worker, verify_rank
from tests.tools.verify.mistakes import one_wrong_element


def wrong_gradient(*arguments: Any, **named: Any) -> None:
    """Add 1e-9 to one element of one rank's gradients."""
    one_wrong_element()
    verify_rank(*arguments, **named)


def killed_rank(rank: Rank, **named: Any) -> None:
    """Kill rank 1 while rank 0 trains."""
    if rank.mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    verify_rank(rank, **named)


def failing_reference(rank: Rank, config: Config, **named: Any) -> None:
    """Let the reference's loss overflow at every step."""
    precision = Precision(level="O2", dtype="fp16", loss_scale=LossScale(initial=1e30))
    reference_worker(rank, config.model_copy(update={"precision": precision}), **named)


def bits_by_rank(rank: Rank, config: Config, data: Path, steps: int) -> dict[str, dict[str, str]]:
    """Draw rank 1's dropout masks from other numbers than one device does."""
    begin, shift = SampleGrains.begin_step, rank.mesh.rank

    def begin_elsewhere(self: SampleGrains, first: int, scale: float) -> None:
        begin(self, first + 1000 * shift, scale)

    with patch.object(SampleGrains, "begin_step", begin_elsewhere):
        return bits_rank(rank, config, data, steps)
