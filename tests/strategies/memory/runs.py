"""Short O2 runs with compared bits: some with states in place, some with states in another memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.config import Config
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.memory.offload import Offloaded
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.strategies.optim.states import InPlace
from meshwright.training.parts import Parts
from meshwright.training.step import train_step as step_on
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.training.checkpoint.states import Held, held_by

STEPS = 10
OVERFLOWS = (2, 3, 7)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2},
    "sgd": {"name": "sgd", "lr": 0.3},
    "momentum": {"name": "momentum", "lr": 0.1},
}
BUCKET = 512
"""Elements: pieces of 256. The model's slots have many pieces, and last pieces that are no multiple of a vector."""


@dataclass(frozen=True)
class Case:
    """The parts of a run. `to` is the place of the states."""

    sync: str = "allreduce"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    clip: float | None = 0.5
    to: str = "none"
    chunk: int = 4
    states: str = "float32"
    masters: str = "float32"


def config_of(case: Case, size: int) -> Config:
    return config_for(
        case.sync,
        size,
        layout={"data": {"size": size, "sync": case.sync}},
        precision={"level": "O2", "dtype": case.dtype, "loss_scale": {"initial": 256.0, "interval": 3}},
        memory={"offload": {"to": case.to, "bucket": BUCKET, "chunk": case.chunk}},
        optimizer=OPTIMIZERS[case.optimizer]
        | {"clip": case.clip, "schedule": {"warmup": 2, "decay": "linear"}}
        | {"states": case.states, "masters": case.masters},
        steps=STEPS,
    )


def parts_of(mesh: Mesh, case: Case, folder: Path) -> Parts:
    """Build the parts of a run. `to: none` gets the buckets of an offloaded run, for sums of the same numbers in the
    same order."""
    if case.to != "none":
        return build(config_of(case, mesh.size("data")), mesh, folder)
    parts = build(config_of(replace(case, to="host"), mesh.size("data")), mesh)
    config = config_of(case, mesh.size("data"))
    return replace(parts, config=config, optimizer=Optimizer(config, parts.strategy.slots, mesh, InPlace))


def train_step(parts: Parts, step: int) -> tuple[float, bool]:
    """Make one step; some steps overflow in fp16. Return the norm, and whether the step was applied."""

    def overflow() -> None:
        gradient = parts.strategy.slots[0].parameter.grad
        assert gradient is not None
        gradient[0] = torch.inf

    overflows = parts.config.precision.dtype == "fp16" and step in OVERFLOWS
    batch = global_batch(parts.config, step)
    result = step_on(parts, batch, step, observe=overflow if overflows else None)
    return result.gradient_norm, result.applied


@dataclass(frozen=True)
class Outcome:
    """A rank's results: norms and applied steps, states as in a checkpoint, weights."""

    steps: list[tuple[float, bool]]
    held: list[Held]
    weights: dict[str, Tensor]
    steps_taken: int


def outcome(parts: Parts, steps: Sequence[tuple[float, bool]]) -> Outcome:
    weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    return Outcome(list(steps), held_by(parts), weights, parts.optimizer.steps_taken)


def run(mesh: Mesh, case: Case, folder: Path) -> Outcome:
    parts = parts_of(mesh, case, folder)
    assert parts.optimizer.make_replicas_equal() == []
    return outcome(parts, [train_step(parts, step) for step in range(STEPS)])


def assert_same_bits(mine: Outcome, wanted: Outcome) -> None:
    assert mine.steps == wanted.steps
    assert mine.steps_taken == wanted.steps_taken
    assert [held[:4] for held in mine.held] == [held[:4] for held in wanted.held]
    for (kind, name, *_, a), (*_, b) in zip(mine.held, wanted.held, strict=True):
        assert torch.equal(a, b), f"{kind} of {name}"
    for name, weight in wanted.weights.items():
        assert torch.equal(mine.weights[name], weight), name


def offloaded(parts: Parts) -> Offloaded:
    held = parts.optimizer.held
    assert isinstance(held, Offloaded)
    return held
