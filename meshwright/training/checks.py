"""A run checks its own memory: numbers stay finite, and replicas hold the same bits.

Numbers: nothing is looked through while all is well. A step knows by the norm and the loss, a checkpoint looks before
it is written. Every rank says in the same words which parameter is the first that is bad, and on which rank, since all
ranks tell each other what they found.

Replicas: a bit that flips in one replica's memory makes no error and no NaN: the run goes on, wrong. But every other
replica still has the right one. Each rank hashes its weights as its backward pass has read them; that is before the
optimizer writes and before owners publish, so that a flip under ZeRO-1 or a parameter server is seen before it is
overwritten. The hashes travel in the step report. Of three replicas and more the odd one out is named, of two both.
Where nothing is held twice (one replica that is cut everywhere) there is nothing to compare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import FlatWeights
from meshwright.compute.parameters.root import held_hashes
from meshwright.ranks.agreement import FACTOR, all_rows, hash_bits
from meshwright.ranks.errors import CorruptionError, DivergedError
from meshwright.ranks.grid import PIPE, Grid
from meshwright.training.parts import Parts

REMEDY = "lower optimizer.lr, raise optimizer.schedule.warmup, or look at the data"

CopyAxes = tuple[str, ...]


def copy_sets(grid: Grid) -> list[CopyAxes]:
    """Every set of axes along which ranks may hold the same; axes of one rank are left out."""
    names = [*(name for name, size in grid.axes if size > 1 and name != PIPE), *grid.stand_ins]
    return [some for count in range(1, len(names) + 1) for some in combinations(names, count)]


def hashes_due(parts: Parts, step: int) -> Tensor:
    """Hash the weights in the steps in which `check.every` compares them, counted from 0; else empty."""
    every = parts.config.check.every
    if not every or (step + 1) % every:
        return torch.empty(0, dtype=torch.int64, device=parts.mesh.device)
    return copy_hashes(parts, parts.strategy.weights)


def root_due(parts: Parts, step: int) -> Tensor:
    """This rank's part of the root of the weights that the step has read, in the steps in which `check.root_every`
    wants one, counted from 0; else empty."""
    every = parts.config.check.root_every
    if not every or (step + 1) % every:
        return torch.empty(0, dtype=torch.int64, device=parts.mesh.device)
    held = (("weight", flat.values, flat.places, flat.copy_axes) for flat in parts.strategy.weights)
    hashes = held_hashes(held, parts.mesh)
    none = torch.zeros(1, dtype=torch.int64, device=parts.mesh.device)
    return torch.stack(list(hashes.values())).sum().reshape(1) if hashes else none


def saved(parts: Parts) -> Iterator[FlatWeights]:
    """All that a checkpoint holds: weights, masters and moments."""
    yield from parts.strategy.weights
    for slot, states in parts.stored():
        for state in states:
            yield FlatWeights(state.values, state.places, slot.copy_axes)


def copy_hashes(parts: Parts, memory: Iterable[FlatWeights]) -> Tensor:
    """Hash the memory that this rank shares along each of the grid's `copy_sets`: int64 [sets], on the device."""
    grid, device = parts.mesh.grid, parts.mesh.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    hashes = dict.fromkeys(copy_sets(grid), zero)
    known = set[str]().union(*hashes)
    for flat in memory:
        # The one of the sets that the axes are.
        if axes := grid.ordered(known.intersection(flat.copy_axes)):
            # A product of odd factors in between: two buckets that were exchanged give another number.
            hashes[axes] = hashes[axes] * FACTOR + hash_bits(flat.values).to(device)
    return torch.stack([*hashes.values(), zero])[:-1]


def gathered_hashes(parts: Parts, memory: Iterable[FlatWeights]) -> list[list[int]]:
    """Hash the memory as `copy_hashes` does; every rank's hashes, in rank order."""
    hashes, world = copy_hashes(parts, memory), parts.mesh.world
    if not len(hashes):
        return [[] for _ in range(world.size)]
    rows: list[list[int]] = all_rows(hashes.cpu(), world).tolist()
    return rows


@dataclass(frozen=True)
class Difference:
    """Ranks that should hold the same along `axes` and do not. `odd`: those that the majority is against, or all."""

    axes: CopyAxes
    group: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def text(self) -> str:
        """A sentence on who differs from whom."""
        others = [rank for rank in self.group if rank not in self.odd]
        if not others:
            return (
                f"{_ranks(self.odd)} should hold the same bits and do not; which is wrong, {len(self.odd)} cannot tell"
            )
        agree = ", which agree" if len(others) > 1 else ""
        return f"{_ranks(self.odd)} differs from {_ranks(others)}{agree}"


def differences(grid: Grid, hashes: Sequence[Sequence[int]]) -> list[Difference]:
    """The groups in which somebody is odd, by every rank's hashes, in rank order."""
    odd_groups = []
    for index, axes in enumerate(copy_sets(grid)):
        for group in grid.groups(*axes):
            values = Counter(hashes[rank][index] for rank in group)
            ((usual, count),) = values.most_common(1)
            if len(values) > 1:
                # Without a majority nobody can tell who is wrong: of two replicas both are named.
                majority = 2 * count > len(group)
                odd = tuple(rank for rank in group if not majority or hashes[rank][index] != usual)
                odd_groups.append(Difference(axes, group, odd))
    return odd_groups


def require_equal_replicas(parts: Parts, step: int, hashes: Sequence[Sequence[int]]) -> None:
    """Raise CorruptionError where the hashes say that replicas differ. All ranks have the same hashes, and call it."""
    odd_groups = differences(parts.mesh.grid, hashes)
    if not odd_groups:
        return
    names = _differing_parameters(parts, odd_groups[0])
    where = f" ({names})" if names else " (in what has been overwritten since, or in an optimizer's states)"
    raise CorruptionError(
        f"step {step}: {odd_groups[0].text}{where}: a bit has flipped in a memory or on its way; go on from the newest "
        "checkpoint, whose replicas agreed (restarts does so); where this comes again, test the memory of the rank's "
        "host, and the layout with meshwright verify"
    )


def _differing_parameters(parts: Parts, difference: Difference) -> str:
    """The first parameter in which the group differs now, and how many there are; '' where none does."""
    mesh = parts.mesh
    names: set[str] = set()
    if mesh.rank in difference.group:
        comm, known = mesh.comm(*difference.axes), set[str]().union(*copy_sets(mesh.grid))
        for flat in parts.strategy.weights:
            if mesh.grid.ordered(known.intersection(flat.copy_axes)) == difference.axes:
                hashes = [hash_bits(flat.values[place.start : place.stop]) for place in flat.places]
                everyone = all_rows(torch.stack(hashes).cpu(), comm)
                unequal = (everyone != everyone[:1]).any(0).tolist()
                names |= {place.name for place, bad in zip(flat.places, unequal, strict=True) if bad}
    first, count = _first_named(parts, names)[difference.group[0]]
    return "" if count == 0 else list(parts.specs)[first] + (f" and {count - 1} more" if count > 1 else "")


def _first_named(parts: Parts, names: Collection[str]) -> list[list[int]]:
    """Every rank tells the index, in the model's order, of the first parameter that it names, and how many it names.

    A rank that names none tells the number of parameters. Sends 16 bytes.
    """
    order = [index for index, name in enumerate(parts.specs) if name in names]
    mine = torch.tensor([min(order, default=len(parts.specs)), len(order)])
    rows: list[list[int]] = all_rows(mine, parts.mesh.world).tolist()
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def require_finite_weights(parts: Parts, step: int) -> None:
    """Raise DivergedError where a weight or a state of the optimizer is not finite, or too large to be squared."""
    # What diverges passes the square root of float32's end before it is infinite: Adam squares it.
    limit = math.sqrt(torch.finfo(torch.float32).max)
    if bad := first_bad(parts, saved(parts), limit):
        raise DivergedError(
            f"step {step}: the weights of {bad} are not finite, or beyond 1e19: nothing is saved; {REMEDY}"
        )


def diagnosed(parts: Parts, everyones: Sequence[float], error: DivergedError) -> DivergedError:
    """The error of a step whose gradient is not finite, with what is known of it. Called by all ranks."""
    slots = parts.strategy.slots
    gradients = [FlatWeights(slot.parameter.grad, slot.places, ()) for slot in slots if slot.parameter.grad is not None]
    findings = [str(error)]
    if bad := first_bad(parts, gradients):
        findings.append(f"the gradient of {bad} is not finite")
    # Slots that stream were stepped as their gradients came, before the norm of all was known.
    if parts.optimizer.streams:
        findings.append("the weights have taken the step already, and are not saved")
    else:
        bad = first_bad(parts, parts.strategy.weights)
        findings.append(f"the weights of {bad} are not finite" if bad else "all weights are finite")
    if losses := bad_losses(everyones):
        findings.append(losses)
    return DivergedError("; ".join([*findings, REMEDY]))


def first_bad(parts: Parts, memory: Iterable[FlatWeights], limit: float = math.inf) -> str:
    """The model's first parameter that reaches `limit` or is not a number on some rank, that rank, and how many such
    parameters a rank found; empty without one."""
    bad = {
        place.name
        for flat in memory
        if not _largest(flat.values) < limit
        for place in flat.places
        if not _largest(flat.values[place.start : place.stop]) < limit
    }
    rows, names = _first_named(parts, bad), list(parts.specs)
    first, rank = min((first, rank) for rank, (first, _) in enumerate(rows))
    if first == len(names):
        return ""
    count = max(count for _, count in rows)
    return f"{names[first]} on rank {rank}" + (f" (the first of {count} parameters)" if count > 1 else "")


def _largest(x: Tensor) -> float:
    """The largest magnitude; not a number where one is not."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.detach())
    return float(torch.maximum(-low, high))


def bad_losses(losses: Sequence[float]) -> str:
    """`the loss is not finite on rank 1`; empty where all are finite."""
    ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    return f"the loss is not finite on {_ranks(ranks)}" if ranks else ""
