"""Runs of stages in two legs, with a checkpoint between the legs."""

from __future__ import annotations

from pathlib import Path

from meshwright.config import Config
from meshwright.ranks.grid import Grid
from tests.training.checkpoint.states import Leg, run_leg
from tests.workers import run_ranks

FIRST, LAST = 2, 4


def legs(config: Config, source: Path | None, target: Path | None, span: range) -> list[Leg]:
    arguments = (config, source, target, span.start, span.stop)
    return run_ranks(run_leg, Grid(config.layout.axes), *arguments, token_axes=config.layout.token_axes)


def losses_of(ranks: list[Leg]) -> list[float]:
    """Return the losses of the rank with the chain's end: the losses of all other ranks are 0."""
    return [max(losses) for losses in zip(*(rank[0] for rank in ranks), strict=True)]
