"""Trainers of small runs with a flipped bit or a number that is not finite."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.compute.model import Batch
from meshwright.config import Config
from meshwright.ranks.errors import CorruptionError, DivergedError
from meshwright.ranks.mesh import Mesh
from meshwright.training.loop import Trainer
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.data_parallel import config_for
from tests.workers import run_ranks


def ended(trainer: Trainer, turns: int, *, flushes: bool = False) -> tuple[int, str, str]:
    """Return the number of the last begun step, and the type and text of the error in this step."""
    try:
        for _ in range(turns):
            trainer.turn(None)
        if flushes:
            trainer.flush()
    except (CorruptionError, DivergedError) as error:
        return trainer.step + 1, type(error).__name__, str(error)
    return trainer.step, "", ""


def spoil(trainer: Trainer, name: str, victim: int, bad: float) -> tuple[int, str, str, bool]:
    """Write a bad number into a weight of the victim before the third step. Return the step, the error, and whether all
    weights of other ranks are unchanged."""
    mesh = trainer.parts.mesh
    ended(trainer, 2)
    weights = trainer.parts.strategy.weights  # waits for weights in transfer, which would overwrite the bad number
    if mesh.rank == victim:
        parameter = dict(trainer.parts.model.named_parameters())[name]
        parameter.data.view(-1)[1] = bad
    before = [flat.values.clone() for flat in weights]
    answer = ended(trainer, 2)
    after = [flat.values for flat in trainer.parts.strategy.weights]
    untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if mesh.rank != victim)
    return *answer, untouched


class Rows:
    """A data set of the equality tests' random batches."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __len__(self) -> int:
        return 100 * self.config.batch.global_

    def samples(self, first: int, count: int) -> Batch:
        step, row = divmod(first, self.config.batch.global_)
        return {name: x[row : row + count] for name, x in BATCHES["gpt2"](self.config, step).items()}

    def held_out(self, first: int, count: int) -> Batch:
        raise AssertionError("nobody validates here")


MODEL = {
    "layers": 2, "hidden": 24, "heads": 6, "positions": 12, "vocabulary": 300, "vocabulary_multiple": 24,
    "dropout": 0.0,
}  # fmt: skip

EXPAND, NORM, TABLE = "blocks.1.feed_forward.expand.weight", "blocks.1.feed_forward_norm.weight", "tokens.weight"


def config_of(layout: dict[str, Any], every: int = 1, model: dict[str, Any] = MODEL) -> Config:
    return config_for("allreduce", 1, model=model, batch={"global": 12}, layout=layout, check={"every": every})


def trainer_of(mesh: Mesh, config: Config) -> Trainer:
    return Trainer(build(config, mesh), Rows(config))


def outcome(trainer: Trainer, turns: int, **arguments: Any) -> tuple[int, str]:
    """Return the number of the last begun step, and the text of the CorruptionError in this step."""
    try:
        for _ in range(turns):
            trainer.turn(None, **arguments)
    except CorruptionError as error:
        return trainer.step + 1, str(error)
    return trainer.step, ""


def run_layout(function: Any, config: Config, *arguments: Any) -> list[Any]:
    """Run a function on ranks that are processes, because functions patch one rank's computation."""
    return run_ranks(function, config.grid, config, *arguments, token_axes=config.layout.token_axes, transport="torch")
