"""Checks of a run's own memory: numbers stay finite, and replicas hold equal bits.

Numbers: a step is checked only by the norm and the loss, so a good step reads no tensor again. All saved tensors are
checked before a checkpoint is written. Ranks exchange findings, so every rank names the same first bad parameter and
the same rank.

Replicas: a flipped bit in one replica's memory makes no error and no NaN, and the run continues with a wrong weight.
The other replicas still hold the right bit. Each rank hashes its weights as read by the backward pass, before the
optimizer writes and before owners publish. So a flip under ZeRO-1 or a parameter server is found before it is
overwritten. The hashes are sent in the step report. Of three or more replicas the odd one is named, of two both. If no
tensor is held twice (one replica, sharded everywhere), there is nothing to compare.
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
    """List every set of axes along which ranks may hold equal values; axes of size 1 are left out."""
    names = [*(name for name, size in grid.axes if size > 1 and name != PIPE), *grid.stand_ins]
    return [some for count in range(1, len(names) + 1) for some in combinations(names, count)]


def hashes_due(parts: Parts, step: int) -> Tensor:
    """Hash the weights if `check.every` compares them after step `step`, counted from 0; else return an empty
    tensor."""
    every = parts.config.check.every
    if not every or (step + 1) % every:
        return torch.empty(0, dtype=torch.int64, device=parts.mesh.device)
    return copy_hashes(parts, parts.strategy.weights)


def root_due(parts: Parts, step: int) -> Tensor:
    """Hash this rank's part of the weights read by the step, for the root, if `check.root_every` asks for one after
    step `step` (from 0); else return an empty tensor."""
    every = parts.config.check.root_every
    if not every or (step + 1) % every:
        return torch.empty(0, dtype=torch.int64, device=parts.mesh.device)
    held = (("weight", flat.values, flat.places, flat.copy_axes) for flat in parts.strategy.weights)
    hashes = held_hashes(held, parts.mesh)
    none = torch.zeros(1, dtype=torch.int64, device=parts.mesh.device)
    return torch.stack(list(hashes.values())).sum().reshape(1) if hashes else none


def saved(parts: Parts) -> Iterator[FlatWeights]:
    """Yield all tensors of a checkpoint: weights, master weights and moments."""
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
        # The set that equals the tensor's axes.
        if axes := grid.ordered(known.intersection(flat.copy_axes)):
            # The factor (odd) makes the hash depend on the order of buckets.
            hashes[axes] = hashes[axes] * FACTOR + hash_bits(flat.values).to(device)
    return torch.stack([*hashes.values(), zero])[:-1]


def gathered_hashes(parts: Parts, memory: Iterable[FlatWeights]) -> list[list[int]]:
    """Hash the memory by `copy_hashes`; return every rank's hashes, in rank order."""
    hashes, world = copy_hashes(parts, memory), parts.mesh.world
    if not len(hashes):
        return [[] for _ in range(world.size)]
    rows: list[list[int]] = all_rows(hashes.cpu(), world).tolist()
    return rows


@dataclass(frozen=True)
class Difference:
    """A group of ranks along `axes` with unequal replicas. `odd`: ranks that differ from the majority, or all ranks if
    there is no majority."""

    axes: CopyAxes
    group: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def text(self) -> str:
        """Name the ranks that differ and the ranks that agree, in a sentence."""
        others = [rank for rank in self.group if rank not in self.odd]
        if not others:
            return (
                f"{_ranks(self.odd)} should hold the same bits and do not; which is wrong, {len(self.odd)} cannot tell"
            )
        agree = ", which agree" if len(others) > 1 else ""
        return f"{_ranks(self.odd)} differs from {_ranks(others)}{agree}"


def differences(grid: Grid, hashes: Sequence[Sequence[int]]) -> list[Difference]:
    """List the groups with unequal hashes. `hashes`: every rank's, in rank order."""
    odd_groups = []
    for index, axes in enumerate(copy_sets(grid)):
        for group in grid.groups(*axes):
            values = Counter(hashes[rank][index] for rank in group)
            ((usual, count),) = values.most_common(1)
            if len(values) > 1:
                # Without a majority the wrong rank is unknown: of two replicas both are named.
                majority = 2 * count > len(group)
                odd = tuple(rank for rank in group if not majority or hashes[rank][index] != usual)
                odd_groups.append(Difference(axes, group, odd))
    return odd_groups


def require_equal_replicas(parts: Parts, step: int, hashes: Sequence[Sequence[int]]) -> None:
    """Raise CorruptionError if the hashes of replicas differ. Collective: all ranks call, with the same hashes."""
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
    """Name the first parameter that differs in the group now, and count the others; '' if none differs."""
    mesh = parts.mesh
    names: set[str] = set()
    if mesh.rank in difference.group:
        comm, known = mesh.comm(*difference.axes), set[str]().union(*copy_sets(mesh.grid))
        for flat in parts.strategy.weights:
            if mesh.grid.ordered(known.intersection(flat.copy_axes)) == difference.axes:
                hashes = [hash_bits(flat.values[region.start : region.stop]) for region in flat.places]
                everyone = all_rows(torch.stack(hashes).cpu(), comm)
                unequal = (everyone != everyone[:1]).any(0).tolist()
                names |= {region.name for region, bad in zip(flat.places, unequal, strict=True) if bad}
    first, count = _first_named(parts, names)[difference.group[0]]
    return "" if count == 0 else list(parts.specs)[first] + (f" and {count - 1} more" if count > 1 else "")


def _first_named(parts: Parts, names: Collection[str]) -> list[list[int]]:
    """Gather each rank's index (in the model's order) of the first parameter in `names`, and the count of names.

    A rank without names sends the number of parameters as its index. Sends 16 bytes.
    """
    order = [index for index, name in enumerate(parts.specs) if name in names]
    mine = torch.tensor([min(order, default=len(parts.specs)), len(order)])
    rows: list[list[int]] = all_rows(mine, parts.mesh.world).tolist()
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 1` or `ranks 0, 2 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def require_finite_weights(parts: Parts, step: int) -> None:
    """Raise DivergedError if a weight or an optimizer state is not finite, or too large to be squared."""
    # Diverging numbers pass the square root of float32's maximum before they are infinite, and Adam squares gradients.
    limit = math.sqrt(torch.finfo(torch.float32).max)
    if bad := first_bad(parts, saved(parts), limit):
        raise DivergedError(
            f"step {step}: the weights of {bad} are not finite, or beyond 1e19: nothing is saved; {REMEDY}"
        )


def diagnosed(parts: Parts, everyones: Sequence[float], error: DivergedError) -> DivergedError:
    """Return the error of a step with an infinite or NaN gradient, with all findings. Collective: all ranks call."""
    slots = parts.strategy.slots
    gradients = [FlatWeights(slot.parameter.grad, slot.places, ()) for slot in slots if slot.parameter.grad is not None]
    findings = [str(error)]
    if bad := first_bad(parts, gradients):
        findings.append(f"the gradient of {bad} is not finite")
    # Streamed slots were updated as soon as their gradients were reduced, before the whole norm was known.
    if parts.optimizer.streams:
        findings.append("the weights have taken the step already, and are not saved")
    else:
        bad = first_bad(parts, parts.strategy.weights)
        findings.append(f"the weights of {bad} are not finite" if bad else "all weights are finite")
    if losses := bad_losses(everyones):
        findings.append(losses)
    return DivergedError("; ".join([*findings, REMEDY]))


def first_bad(parts: Parts, memory: Iterable[FlatWeights], limit: float = math.inf) -> str:
    """Name the model's first parameter that reaches `limit` or is NaN on a rank, that rank, and the most such
    parameters found by a rank; '' if there is none. Collective: all ranks call."""
    bad = {
        region.name
        for flat in memory
        if not _largest(flat.values) < limit
        for region in flat.places
        if not _largest(flat.values[region.start : region.stop]) < limit
    }
    rows, names = _first_named(parts, bad), list(parts.specs)
    first, rank = min((first, rank) for rank, (first, _) in enumerate(rows))
    if first == len(names):
        return ""
    count = max(count for _, count in rows)
    return f"{names[first]} on rank {rank}" + (f" (the first of {count} parameters)" if count > 1 else "")


def _largest(x: Tensor) -> float:
    """Return the largest magnitude; NaN if an element is NaN."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.detach())
    return float(torch.maximum(-low, high))


def bad_losses(losses: Sequence[float]) -> str:
    """Return `the loss is not finite on rank 1`, or '' if all losses are finite."""
    ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    return f"the loss is not finite on {_ranks(ranks)}" if ranks else ""
