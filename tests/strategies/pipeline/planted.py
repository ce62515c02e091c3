"""Workers of `verify` with a planted bug in the pipeline."""

from __future__ import annotations

from typing import Any

from meshwright.strategies.pipeline.stage import Stage
from meshwright.tools.verify.job import verify_rank


def dropped_work(*arguments: Any, **named: Any) -> None:
    """Leave out one weight gradient of microbatch 0 on the last stage."""
    right = Stage.weights

    def wrong(self: Stage, index: int, *, final: bool) -> None:
        if self.is_last and index == 0:
            self._works[index].pop()
        right(self, index, final=final)

    Stage.weights = wrong  # type: ignore[method-assign]
    verify_rank(*arguments, **named)
