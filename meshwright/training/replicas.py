"""Replicas hold the same bits, or one of them is wrong: hashes of what ranks hold alike, compared in the step report.

A bit that flips in one replica's memory makes no error and no NaN: the run goes on, wrong. But every other replica
still has the right one. Each rank hashes its weights as its backward pass has read them; that is before the optimizer
writes and before owners publish, so that a flip under ZeRO-1 or a parameter server is seen before it is overwritten.
Of three replicas and more the odd one out is named, of two both. Where nothing is held twice (`fsdp`, one replica that
is cut everywhere) there is nothing to compare.

A hash is 64 bits: sum over words w[r, c] of 8 bytes of w[r, c] · (row[r] + column[c]) modulo 2^64. Rows' factors are
even, columns' odd: a factor is odd, so that any flipped bit changes the sum; a word in another's place changes it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from meshwright.errors import CorruptionError
from meshwright.parameters.bucket import FlatWeights
from meshwright.parts import Parts
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.grid import ENDS, PIPE, Grid
from meshwright.ranks.mesh import Mesh

COLUMNS = 2**10
BLOCK_ROWS = {"cpu": 2**7, "cuda": 2**17}
"""Rows that are read at once: a CPU's cache holds 1 MiB for both sums, a GPU wants few kernels."""
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, as a signed number: neighbours get factors far apart."""

CopyAxes = tuple[str, ...]


def hash_bits(x: Tensor) -> Tensor:
    """The hash of the bits of x [n], contiguous: an int64 scalar on its device."""
    words = _words(x)
    whole = words.numel() // COLUMNS * COLUMNS
    blocks = words[:whole].view(-1, COLUMNS).split(BLOCK_ROWS[x.device.type])
    rest = words[whole:]
    rows = torch.cat([*(block.sum(1) for block in blocks), rest.sum(0, keepdim=True)])
    columns = torch.stack([block.sum(0) for block in blocks]).sum(0) if whole else words.new_zeros(COLUMNS)
    columns[: rest.numel()] += rest
    row_factors = torch.arange(1, rows.numel() + 1, device=x.device) * _FACTOR * 2
    column_factors = torch.arange(COLUMNS, device=x.device) * _FACTOR | 1
    return (rows * row_factors).sum() + (columns * column_factors).sum()


def _words(x: Tensor) -> Tensor:
    """x's memory as int64; its last bytes with zeros behind them."""
    if x.storage_offset() * x.element_size() % 8:
        x = x.clone()
    each = 8 // x.element_size()
    whole = x.numel() // each * each
    words = x[:whole].view(torch.int64)
    if whole == x.numel():
        return words
    last = x.new_zeros(each)
    last[: x.numel() - whole] = x[whole:]
    return torch.cat([words, last.view(torch.int64)])


def copy_sets(grid: Grid) -> list[CopyAxes]:
    """Every set of axes along which ranks may hold the same; axes of one rank are left out."""
    names = [name for name, size in grid.axes if size > 1 and name != PIPE]
    if dict(grid.axes).get(PIPE, 1) > 1:
        names.append(ENDS)
    return [some for count in range(1, len(names) + 1) for some in combinations(names, count)]


def weight_hashes(parts: Parts) -> list[int]:
    """Hash the weights that this rank shares along each of the grid's `copy_sets`: one hash for each set."""
    return _hashes(parts.mesh, parts.strategy.weights)


def state_hashes(parts: Parts) -> list[int]:
    """The same of weights and of what an optimizer keeps, masters and moments: all that a checkpoint holds."""
    grid = parts.mesh.grid
    states = (
        FlatWeights(tensor, slot.places, slot.copy_axes(grid))
        for index, slot in enumerate(parts.strategy.slots)
        for tensor in parts.optimizer.states(index).values()
    )
    return _hashes(parts.mesh, [*parts.strategy.weights, *states])


def _hashes(mesh: Mesh, held: Iterable[FlatWeights]) -> list[int]:
    grid, device = mesh.grid, mesh.device
    hashes: dict[CopyAxes, Tensor | int] = dict.fromkeys(copy_sets(grid), 0)
    for flat in held:
        axes = _shared(grid, flat.copy_axes)
        if axes:
            hashes[axes] = hashes[axes] * _FACTOR + hash_bits(flat.values).to(device)
    return [int(value) for value in hashes.values()]


def _shared(grid: Grid, copy_axes: CopyAxes) -> CopyAxes:
    """The one of `copy_sets` that the axes are."""
    known = {name for some in copy_sets(grid) for name in some}
    return tuple(name for name in grid.ordered(copy_axes) if name in known)


def gathered(mesh: Mesh, hashes: Sequence[int]) -> list[list[int]]:
    """Every rank's hashes, in rank order."""
    mine = torch.tensor(hashes, dtype=torch.int64, device=mesh.device)
    everyone = all_rows(mine, mesh.world) if hashes else mine.new_empty(mesh.world.size, 0)
    rows: list[list[int]] = everyone.tolist()
    return rows


@dataclass(frozen=True)
class Difference:
    """Ranks that should hold the same along `axes` and do not. `odd`: those that the majority is against, or all."""

    axes: CopyAxes
    group: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def text(self) -> str:
        """Who differs from whom."""
        others = [rank for rank in self.group if rank not in self.odd]
        if not others:
            return (
                f"{_ranks(self.odd)} should hold the same bits and do not; which is wrong, {len(self.odd)} cannot tell"
            )
        agree = ", which agree" if len(others) > 1 else ""
        return f"{_ranks(self.odd)} differs from {_ranks(others)}{agree}"


def differences(grid: Grid, hashes: Sequence[Sequence[int]]) -> list[Difference]:
    """Who is odd, from every rank's hashes, in rank order."""
    found = []
    for index, axes in enumerate(copy_sets(grid)):
        for group in grid.groups(*axes):
            values = Counter(hashes[rank][index] for rank in group)
            ((usual, count),) = values.most_common(1)
            if len(values) > 1:
                majority = 2 * count > len(group)
                odd = tuple(rank for rank in group if not majority or hashes[rank][index] != usual)
                found.append(Difference(axes, group, odd))
    return found


def require_equal_replicas(parts: Parts, step: int, hashes: Sequence[Sequence[int]]) -> None:
    """Raise CorruptionError where the hashes say that replicas differ. All ranks have the same hashes, and call it."""
    found = differences(parts.mesh.grid, hashes)
    if not found:
        return
    names = _differing_parameters(parts, found[0])
    where = f" ({names})" if names else " (in what has been overwritten since, or in an optimizer's states)"
    raise CorruptionError(
        f"step {step}: {found[0].text}{where}: a bit has flipped in a memory or on its way; go on from the newest "
        "checkpoint, whose replicas agreed (restarts does so); where this comes again, test the memory of the rank's "
        "host, and the layout with meshwright verify"
    )


def _differing_parameters(parts: Parts, difference: Difference) -> str:
    """The first parameter in which the group differs now, and how many there are; '' where none does."""
    mesh, grid = parts.mesh, parts.mesh.grid
    order = list(parts.specs)
    found: list[int] = []
    if mesh.rank in difference.group:
        comm = mesh.comm(*difference.axes)
        for flat in parts.strategy.weights:
            if _shared(grid, flat.copy_axes) == difference.axes:
                prints = [hash_bits(flat.values[place.start : place.stop]) for place in flat.places]
                everyone = all_rows(torch.stack(prints), comm)
                unequal = (everyone != everyone[:1]).any(0).tolist()
                found += [order.index(place.name) for place, bad in zip(flat.places, unequal, strict=True) if bad]
    told = torch.tensor([min(found, default=-1), len(set(found))], device=mesh.device)
    everyone = all_rows(told, mesh.world)
    first, count = everyone[difference.group[0]].tolist()
    return "" if count == 0 else order[first] + (f" and {count - 1} more" if count > 1 else "")


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
