"""One run on its layout's ranks, through the training loop, against `verify`'s reference: plain torch on one device.

In float64 the tolerances are the tolerances of `meshwright verify`. In other precisions, sums in another order round to
other numbers, and the model decides how far these numbers differ. So the layout and one device in the run's precision
are both compared with one device in float64. The layout's distance may be FURTHER times the distance of one device,
plus verify's tolerance. Gradients are the first step's.

The comparison needs functions that neither jump nor divide by rounding errors. Three functions do:

- ReLU's derivative jumps at zero. A sum on the other side of zero, by fp16's last bit, in one token's row moves the
  gradient of a small model by a fiftieth. So ReLU is ReLU in float64 only; elsewhere layout and oracles have SiLU.
- A delta net divides queries and keys by their lengths. A length near zero is rounding alone, with a gradient a
  thousand times a weight's. So in precisions other than float64, the addend to squared lengths is UNIT instead of 1e-6.
- Adam divides an element of the gradient by the element's size. An element of rounding alone moves a weight by a tenth
  of the rate, either way. So in half precision the last weights are compared with float64's as one tensor, as in
  verify. In addition, each parameter is compared, to float32's tolerance, with a step of torch's optimizer by the
  layout's gradients of all steps: any gradients have to be applied in this way.

Weights are the masters, which are stepped: a bias after two steps is below fp16's normal numbers. The half-precision
copies have to be the masters, rounded, to the bit.
"""

from __future__ import annotations

import faulthandler
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.compute.model import IGNORED, Batch, rows_of
from meshwright.compute.models import delta_rule
from meshwright.compute.models.preferences import PAIRS
from meshwright.compute.parameters.bucket import Place, Slot
from meshwright.config import Config, parse_config
from meshwright.parity.compare import relative_error
from meshwright.ranks.mesh import Mesh, solo_mesh
from meshwright.tools.verify.outcome import Outcome, reference_run
from meshwright.tools.verify.reference import Reference
from meshwright.tools.verify.tolerance import TOLERANCES, tolerance_of
from meshwright.training.loop import Trainer
from meshwright.training.parts import Parts
from meshwright.training.references import ReferredPairs, log_probabilities
from tests.compute.models.preferring import random_pairs
from tests.harness import build, resolved
from tests.oracle.batches import BATCHES
from tests.workers import run_ranks

FURTHER = 6

UNIT = 1.0

SAME, MOVED = 1e-6, 1e-3
"""States that are rounded at random: weights are equal within 16 last bits of float32 of the parameter's largest.

MOVED is the share of the weights that may differ. If a number before the rounding is off by one last bit, the number is
rounded to the other neighbour once in 2^16 draws. With other random bits about half of the weights differ.
"""

Pieces = list[tuple[Place, Tensor]]
"""A rank's parts of some tensors."""


Plant = Callable[[], None]
"""A function that breaks something in a rank's process, before the rank's parts are built."""


@dataclass(frozen=True)
class Trained:
    """A rank's results of all steps.

    `gradients` are each step's, unscaled and unclipped. `initial` and `weights` are the masters, before the first step
    and after the last. `stale`: the parameters with a half-precision copy that is not the rounded master.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    initial: Pieces = field(default_factory=list)
    weights: Pieces = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stream:
    """The random batches of a run as samples, one batch after the other."""

    config: Config

    def __len__(self) -> int:
        return self.config.batch.global_ * (self.config.steps + 1)

    def samples(self, first: int, count: int) -> Batch:
        step, row = divmod(first, self.config.batch.global_)
        batch = BATCHES[self.config.model.family] if self.config.loss is None else random_pairs
        return rows_of(batch(self.config, step), slice(row, row + count))

    def numbered(self, numbers: np.ndarray) -> Batch:
        """Return pairs with these numbers; for a negative number, a pair that does not count."""
        rows = [self.samples(int(number), 1) for number in np.maximum(numbers, 0)]
        batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        batch[PAIRS][numbers < 0] = IGNORED
        return batch

    def held_out(self, first: int, count: int) -> Batch:
        raise AssertionError("nothing is held out")


class HeldOut(Stream):
    """A stream with the first batches as held-out batches, too."""

    def held_out(self, first: int, count: int) -> Batch:
        return self.samples(first, count)


def oracles_of(config: Config) -> list[Outcome]:
    """Return the results of one device in the run's precision, and for other precisions also in float64."""
    tree = config.model_dump(mode="json", by_alias=True) | {"layout": {"transport": "torch"}, "memory": {}}
    tree["optimizer"] |= {"states": "float32", "masters": "float32"}  # torch's optimizer rounds nothing at random
    exact = {"level": "O0", "dtype": "float64"}
    precisions = [exact] if config.precision.dtype == "float64" else [tree["precision"], exact]
    runs = [parse_config(tree | {"precision": precision}) for precision in precisions]
    stream = Stream(config)
    batches = [stream.samples(step * config.batch.global_, config.batch.global_) for step in range(config.steps)]
    return [reference_run(run, batches, config.steps) for run in runs]


def train(mesh: Mesh, config: Config, plant: Plant | None) -> tuple[Trained, list[Outcome]]:
    """Return every rank's results, and on rank 0 the oracles', too."""
    with without_jumps(config), tempfile.TemporaryDirectory(prefix="meshwright-fuzz-") as folder:
        oracles = oracles_of(config) if mesh.rank == 0 else []
        if plant is not None:
            plant()
        trained = _train(mesh, config, Path(folder))
    faulthandler.cancel_dump_traceback_later()
    return trained, oracles


def without_jumps(config: Config) -> AbstractContextManager[Any]:
    """Replace ReLU by SiLU, and lengthen queries and keys of delta nets, except in float64."""
    if config.precision.dtype == "float64":
        return nullcontext()
    patches = ExitStack()
    patches.enter_context(patch.object(functional, "relu", functional.silu))
    patches.enter_context(patch.object(delta_rule, "UNIT_EPSILON", UNIT))
    return patches


def _train(mesh: Mesh, config: Config, folder: Path) -> Trained:
    parts = build(config, mesh, folder)
    assert parts.strategy.make_replicas_equal() == [], "replicas begin with different weights"
    stream: Any = Stream(config)
    if config.loss is not None:  # the layout's pass under the first weights
        stream = ReferredPairs(stream, log_probabilities(parts, stream, np.arange(len(stream))))
    trainer, trained = Trainer(parts, stream, late=False), Trained(initial=_masters(parts))
    for _ in range(config.steps):
        with _watched(parts, trained.gradients):
            (line,), _ = trainer.turn(None)
        trained.losses.append(float(line["loss"]))
        trained.norms.append(float(line["grad_norm"]))
    trained.weights.extend(_masters(parts))
    for index, slot in enumerate(parts.strategy.slots):
        master = parts.optimizer.held.tensors(index)["weight"]
        if not torch.equal(slot.parameter.detach(), master.to(slot.parameter)):
            trained.stale.extend(place.name for place in slot.places)
    return trained


def _watched(parts: Parts, gradients: list[Pieces]) -> AbstractContextManager[Any]:
    """Note a step's gradients as each arrives: an optimizer that streams goes on streaming."""
    arrivals, scale = parts.strategy.arrivals, parts.optimizer.scaler.scale
    noted: Pieces = []
    gradients.append(noted)

    def watched() -> Iterator[int]:
        return noting(arrivals())  # the call itself sends the remaining messages

    def noting(arriving: Iterable[int]) -> Iterator[int]:
        for index in arriving:
            slot = parts.strategy.slots[index]
            assert slot.parameter.grad is not None or not slot.places, "a slot without a gradient"
            noted.extend((place, part / scale) for place, part in _parts(slot, slot.parameter.grad))
            yield index

    return patch.object(parts.strategy, "arrivals", watched)


def _masters(parts: Parts) -> Pieces:
    return [piece for slot, (weight, *_) in parts.stored() for piece in _parts(slot, weight.values)]


def _parts(slot: Slot, x: Tensor) -> Pieces:
    return [(place, _part(x, place)) for place in slot.places]


def _part(x: Tensor, place: Place) -> Tensor:
    return x.detach()[place.start : place.stop].view(place.box.lengths).double().clone()


def mistakes(config: Config, plant: Plant | None = None) -> list[str]:
    """Return the differences, in words. Raises the ranks' errors, and AssertionError if ranks hang.

    A rank has two threads in float32, to show mistakes of several threads, and one thread in other precisions.
    """
    threads = 2 if config.precision.dtype == "float32" else 1
    config = resolved(config)
    with without_jumps(config):  # here as well: ranks that are threads would restore each other's patches
        results = run_ranks(
            train,
            config.grid,
            config,
            plant,
            token_axes=config.layout.token_axes,
            threads=threads,
        )
    ranks, oracles = [trained for trained, _ in results], results[0][1]
    allowed = tolerance_of(config)
    gradients = [trained.gradients[0] for trained in ranks]
    compare_weights = _weights_of_half if allowed.together else _weights
    compare_weights = _weights_of_rounded if config.optimizer.rounds else compare_weights
    return [
        *_scalars("loss", [trained.losses for trained in ranks], [one.losses for one in oracles], allowed.loss),
        *_scalars("norm", [trained.norms for trained in ranks], [one.norms for one in oracles], allowed.norm),
        *_pieces(
            "initial weight", [trained.initial for trained in ranks], [one.initial for one in oracles], allowed.weight
        ),
        *(
            f"{name}: the gradient on one device is zero everywhere"
            for name, gradient in oracles[-1].gradients.items()
            if not gradient.any()
        ),
        *_pieces("gradient", gradients, [one.gradients for one in oracles], allowed.gradient),
        *(f"rank {rank}: {name} is not its master, rounded" for rank, one in enumerate(ranks) for name in one.stale),
        *compare_weights(config, ranks, [oracle.weights for oracle in oracles]),
    ]


def _weights(config: Config, ranks: list[Trained], oracles: list[dict[str, Tensor]]) -> Iterator[str]:
    yield from _pieces("weight", [trained.weights for trained in ranks], oracles, tolerance_of(config).weight)


def _weights_of_half(config: Config, ranks: list[Trained], oracles: list[dict[str, Tensor]]) -> Iterator[str]:
    """Compare all weights as one tensor with the oracles, and each with torch's step of the layout's gradients."""
    shapes = {name: x.shape for name, x in oracles[-1].items()}
    mine = _whole([trained.weights for trained in ranks], shapes)
    yield from _together(mine, oracles, tolerance_of(config).weight)
    gradients = [_whole(of_step, shapes) for of_step in zip(*(trained.gradients for trained in ranks), strict=True)]
    stepped = _stepped(config, _whole([trained.initial for trained in ranks], shapes), gradients)
    weights = [trained.weights for trained in ranks]
    yield from _pieces("optimizer's step", weights, [stepped], TOLERANCES["float32"].weight)


def _together(mine: dict[str, Tensor], oracles: list[dict[str, Tensor]], tolerance: float) -> Iterator[str]:
    together, *others = (torch.cat([one[name].flatten() for name in mine]) for one in (oracles[-1], mine, oracles[0]))
    error, rounding = (relative_error(other, together) for other in others)
    if not error <= _allowed(tolerance, rounding):
        yield f"the weights, all together, are off by {error:.1e}"


def _weights_of_rounded(config: Config, ranks: list[Trained], oracles: list[dict[str, Tensor]]) -> Iterator[str]:
    """Compare all weights as one tensor, to the tolerance of bf16, the format of the stored states.

    Each element is compared with our step of the layout's gradients on one device, which draws the same random bits: by
    seed, name and number of the element.
    """
    shapes = {name: x.shape for name, x in oracles[-1].items()}
    mine = _whole([trained.weights for trained in ranks], shapes)
    yield from _together(mine, oracles, TOLERANCES["bf16"].weight)
    gradients = [_whole(of_step, shapes) for of_step in zip(*(trained.gradients for trained in ranks), strict=True)]
    stepped = _stepped_alone(config, gradients)
    other = sum(int(((mine[name] - x).abs() > SAME * x.abs().max()).sum()) for name, x in stepped.items())
    count = sum(x.numel() for x in stepped.values())
    if other > MOVED * count:
        yield f"{other} of {count} weights are not one device's, rounded by the same random bits"


def _stepped_alone(config: Config, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weights after our optimizer's steps by these gradients on one device."""
    tree = config.model_dump(mode="json", by_alias=True) | {"layout": {"transport": "torch"}, "memory": {}}
    alone = resolved(parse_config(tree))
    parts = build(alone, solo_mesh(torch.device("cpu"), alone.grid.names))
    for step, of_step in enumerate(gradients):
        for slot in parts.strategy.slots:
            for place in slot.places:
                assert slot.parameter.grad is not None
                scaled = of_step[place.name][place.box.slices].flatten() * parts.optimizer.scaler.scale
                slot.parameter.grad[place.start : place.stop] = scaled
        parts.optimizer.step(step)
    return _whole([_masters(parts)], {name: x.shape for name, x in gradients[0].items()})


def _whole(ranks: Iterable[Pieces], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return all ranks' pieces put together; of elements that several ranks hold, the last rank's."""
    whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for pieces in ranks:
        for place, part in pieces:
            whole[place.name][place.box.slices] = part
    return whole


def _stepped(config: Config, initial: dict[str, Tensor], gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weights after steps of torch's optimizer by these gradients, without steps that overflowed.

    The first weights are the layout's: fully sharded masters are not rounded to half precision before the first step.
    """
    reference = Reference(config, torch.device("cpu"))
    reference.scaler = torch.amp.GradScaler("cpu", enabled=False)  # the gradients are unscaled already
    for name, parameter in reference.parameters.items():
        parameter.data.copy_(initial[name])
    for step, of_step in enumerate(gradients):
        norm = math.sqrt(sum(float(x.square().sum()) for x in of_step.values()))
        if math.isfinite(norm):
            for name, gradient in reference.gradients.items():
                gradient.copy_(of_step[name])
            reference.update(step, norm)
    return {name: x.detach() for name, x in reference.parameters.items()}


def _scalars(kind: str, ranks: list[list[float]], oracles: list[list[float]], tolerance: float) -> Iterator[str]:
    """Compare every rank's number of each step with the last oracle's."""
    for rank, numbers in enumerate(ranks):
        for step, (mine, wanted) in enumerate(zip(numbers, oracles[-1], strict=True)):
            error, rounding = (abs(one - wanted) / abs(wanted) for one in (mine, oracles[0][step]))
            if not error <= _allowed(tolerance, rounding):
                yield f"rank {rank}: the {kind} of step {step + 1} is off by {error:.1e}"


def _pieces(kind: str, ranks: list[Pieces], oracles: list[dict[str, Tensor]], tolerance: float) -> Iterator[str]:
    """Compare each rank's part of each parameter with the whole parameter, and report missing parts."""
    alone, whole = ({name: x.double() for name, x in oracle.items()} for oracle in (oracles[0], oracles[-1]))
    sizes = {name: float(x.norm()) for name, x in whole.items()}
    rounding = {name: float((alone[name] - x).norm()) / (sizes[name] or 1) for name, x in whole.items()}
    missing = {name: torch.ones(x.shape, dtype=torch.bool) for name, x in whole.items()}
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
    """Return the allowed error; `rounding`: the error of one device in the run's precision, against float64."""
    return tolerance + FURTHER * rounding
