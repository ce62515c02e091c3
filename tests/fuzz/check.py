"""One run on its layout's ranks, through the training loop, against `verify`'s reference: plain torch on one device.

In float64 the tolerances are those of `meshwright verify`. Other precisions round sums that are made in another order
to other numbers, how far apart depends on the model: there both are held against one device in float64, and the layout
may be FURTHER times as far from it as one device in its precision is, and verify's tolerance. Gradients are the first
step's.
"""

from __future__ import annotations

import faulthandler
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.batch import Batch, rows_of
from meshwright.bucket import Place
from meshwright.build import Parts, build
from meshwright.config import Config, parse_config
from meshwright.grid import Grid
from meshwright.mesh import Mesh
from meshwright.train.loop import Trainer
from meshwright.verify.compare import tolerance_of
from meshwright.verify.reference import Outcome, reference_run
from tests.data_parallel.test_equality import BATCHES
from tests.workers import run_ranks

TIMEOUT_SECONDS = 100

FURTHER = 6

Pieces = list[tuple[Place, Tensor]]
"""What a rank holds of some tensors."""


@dataclass(frozen=True)
class Trained:
    """What a rank has after its steps."""

    losses: list[float]
    norms: list[float]
    gradients: Pieces
    weights: Pieces


@dataclass(frozen=True)
class Stream:
    """The random batches of a run as its samples, one batch after the other."""

    config: Config

    def __len__(self) -> int:
        return self.config.batch.global_ * (self.config.steps + 1)

    def samples(self, first: int, count: int) -> Batch:
        step, row = divmod(first, self.config.batch.global_)
        return rows_of(BATCHES[self.config.model.family](self.config, step), slice(row, row + count))

    def held_out(self, first: int, count: int) -> Batch:
        raise AssertionError("nothing is held out")


def oracles_of(config: Config) -> list[Outcome]:
    """One device in the run's precision; where that is another one in float64, too."""
    tree = config.model_dump(mode="json", by_alias=True) | {"layout": {"transport": "torch"}, "memory": {}}
    exact = {"level": "O0", "dtype": "float64"}
    precisions = [exact] if config.precision.dtype == "float64" else [tree["precision"], exact]
    runs = [parse_config(tree | {"precision": precision}) for precision in precisions]
    stream = Stream(config)
    batches = [stream.samples(step * config.batch.global_, config.batch.global_) for step in range(config.steps)]
    return [reference_run(run, batches, config.steps) for run in runs]


def train(mesh: Mesh, config: Config) -> tuple[Trained, list[Outcome]]:
    """Every rank's; on rank 0 the oracles', too."""
    faulthandler.dump_traceback_later(0.9 * TIMEOUT_SECONDS)
    with tempfile.TemporaryDirectory(prefix="meshwright-fuzz-") as folder:
        trained = _train(mesh, config, Path(folder))
    oracles = oracles_of(config) if mesh.rank == 0 else []
    faulthandler.cancel_dump_traceback_later()
    return trained, oracles


def _train(mesh: Mesh, config: Config, folder: Path) -> Trained:
    parts = build(config, mesh, folder)
    assert parts.strategy.make_replicas_equal() == [], "replicas begin with different weights"
    trainer = Trainer(parts, Stream(config))
    losses, norms = [], []
    gradients: Pieces = []
    for step in range(config.steps):
        scale = parts.optimizer.scaler.scale
        keep = _keeper(parts, gradients, scale) if step == 0 else None
        line, _ = trainer.turn(None, keep)
        losses.append(float(line["loss"]))
        norms.append(float(line["grad_norm"]))
    weights = [(place, _part(slot.parameter, place)) for slot in parts.strategy.slots for place in slot.places]
    return Trained(losses, norms, gradients, weights)


def _keeper(parts: Parts, into: Pieces, scale: float) -> Callable[[], None]:
    def keep() -> None:
        for slot in parts.strategy.slots:
            assert slot.parameter.grad is not None or not slot.places, "a slot without a gradient"
            into.extend((place, _part(slot.parameter.grad, place) / scale) for place in slot.places)

    return keep


def _part(x: Tensor, place: Place) -> Tensor:
    return x.detach()[place.start : place.stop].view(place.box.lengths).double().clone()


def mistakes(config: Config) -> list[str]:
    """What is off, in words. Raises what the ranks raise, and AssertionError where they hang.

    Ranks have two threads each in float32, so that what only shows with several is seen there; one in other precisions.
    """
    threads = 2 if config.precision.dtype == "float32" else 1
    results = run_ranks(
        train,
        Grid(config.layout.axes),
        config,
        token_axes=config.layout.token_axes,
        timeout=TIMEOUT_SECONDS,
        threads=threads,
    )
    ranks, oracles = [trained for trained, _ in results], results[0][1]
    allowed = tolerance_of(config)

    def of(kind: str) -> tuple[list[Any], list[Any]]:
        """The ranks' and the oracles'."""
        return [getattr(trained, kind) for trained in ranks], [getattr(oracle, kind) for oracle in oracles]

    return [
        *_scalars("loss", *of("losses"), allowed.loss),
        *_scalars("norm", *of("norms"), allowed.norm),
        *_pieces("gradient", *of("gradients"), allowed.gradient),
        *_pieces("weight", *of("weights"), allowed.weight),
    ]


def _scalars(kind: str, ranks: list[list[float]], oracles: list[list[float]], tolerance: float) -> Iterator[str]:
    """Every rank's number of each step against the last oracle's."""
    for rank, numbers in enumerate(ranks):
        for step, (mine, wanted) in enumerate(zip(numbers, oracles[-1], strict=True)):
            error, rounding = (abs(one - wanted) / abs(wanted) for one in (mine, oracles[0][step]))
            if not error <= _allowed(tolerance, rounding):
                yield f"rank {rank}: the {kind} of step {step + 1} is off by {error:.1e}"


def _pieces(kind: str, ranks: list[Pieces], oracles: list[dict[str, Tensor]], tolerance: float) -> Iterator[str]:
    """Each rank's part of each parameter against the same part of the whole one, and whether all parts are there."""
    alone, whole = ({name: x.double() for name, x in oracle.items()} for oracle in (oracles[0], oracles[-1]))
    sizes = {name: float(x.norm()) for name, x in whole.items()}
    rounding = {name: float((alone[name] - x).norm()) / (sizes[name] or 1) for name, x in whole.items()}
    missing = {name: torch.ones(x.shape, dtype=torch.bool) for name, x in whole.items()}
    yield from (f"{name}: the {kind} on one device is zero everywhere" for name, size in sizes.items() if not size)
    for rank, pieces in enumerate(ranks):
        for place, part in pieces:
            missing[place.name][place.box.slices] = False
            error = float((part - whole[place.name][place.box.slices]).norm()) / (sizes[place.name] or 1)
            if not error <= _allowed(tolerance, rounding[place.name]):
                yield f"rank {rank}: the {kind} of {place.name} is off by {error:.1e}"
    for name, places in missing.items():
        if places.any():
            yield f"{name}: no rank has {int(places.sum())} elements of its {kind}"


def _allowed(tolerance: float, rounding: float) -> float:
    """`rounding`: how far one device in the run's precision is from one in float64."""
    return tolerance + FURTHER * rounding
