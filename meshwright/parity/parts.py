"""Finds by value which elements of a reference tensor a rank holds.

A framework may shard a parameter by rows, by columns, in blocks, or as rows of q, k and v of a fused weight. It may
flatten the parameter first, or use another name. Weights are random, so bit-equal slices of the reference's initial
weight and of the local weight are the same slice. No knowledge of the framework is needed, and the source of a wrong
slice is visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from meshwright.parity.tensors import bytes_of

PADDING = -1
"""The index of a padding row that the reference lacks: vocabularies are padded to a multiple."""

Index = tuple[int, ...] | None


@dataclass(frozen=True)
class Part:
    """A part of the reference's parameter `name`."""

    name: str
    index: tuple[Index, ...]
    """For each dim the indices in order; None: all."""
    flat: bool = False
    """True: a part of the flattened parameter, as in flat buffers of parameters."""

    def take(self, whole: Tensor) -> Tensor:
        """Return the part's values from the reference's tensor; zeros in padding."""
        x = whole.flatten() if self.flat else whole
        for dim, index in enumerate(self.index):
            if index is not None:
                places = torch.tensor(index, dtype=torch.long)
                # PADDING (-1) is no valid index: row 0 is read instead, and zeroed below.
                x = x.index_select(dim, places.clamp(min=0))
                if (places == PADDING).any():
                    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
                    x = torch.where((places == PADDING).view(shape), torch.zeros_like(x), x)
        return x

    @property
    def whole(self) -> bool:
        return not self.flat and all(index is None for index in self.index)

    def __str__(self) -> str:
        if self.whole:
            return "all of it"
        runs = [[] if index is None else _runs(index) for index in self.index]
        # `0:4,8:12` for 0 1 2 3 8 9 10 11; padding has no index in the reference.
        held = [",".join(f"{start}:{stop}" for start, stop in each if start != PADDING) or "padding" for each in runs]
        words = [":" if index is None else text for index, text in zip(self.index, held, strict=True)]
        return f"{'flat ' if self.flat else ''}[{', '.join(words)}]"

    def as_json(self) -> dict[str, Any]:
        """Return the part as JSON, with indices as runs (start, stop)."""
        return {"name": self.name, "index": [None if i is None else _runs(i) for i in self.index], "flat": self.flat}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Part:
        runs = (None if i is None else (range(*run) if run[1] > 0 else [PADDING] for run in i) for i in tree["index"])
        index = tuple(None if i is None else tuple(chain.from_iterable(i)) for i in runs)
        return cls(tree["name"], index, tree["flat"])


def _runs(index: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive indices: (0, 4), (8, 12) for 0 1 2 3 8 9 10 11. Each padding element is a run."""
    runs: list[tuple[int, int]] = []
    for i in index:
        if runs and i == runs[-1][1] and i != PADDING:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def is_constant(x: Tensor) -> bool:
    """Return True if all elements are equal, as in a new bias or norm; such parts cannot be found by value."""
    return x.numel() > 0 and bool((x == x.flatten()[0]).all())


def find_part(name: str, local: Tensor, whole: Tensor) -> Part | None:
    """Find the part of `whole` with the bits of `local`; None if there is none. An empty tensor is an empty part."""
    if local.shape == whole.shape and torch.equal(local, whole):
        return Part(name, (None,) * whole.ndim)
    if local.ndim != whole.ndim:
        return _find_flat(name, local, whole) if local.ndim == 1 else None
    cut = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    # A vector is searched as one run: single bf16 values are equal by chance, so slices of length 1 match anywhere.
    if local.ndim == 1 and local.numel() and (run := _find_flat(name, local, whole)):
        return Part(name, run.index)
    if len(cut) <= 1:
        return _find_slices(name, local, whole, cut[0] if cut else 0)
    blocks = box_candidates(name, local.shape, whole.shape, cut)
    found = next((block for block in blocks if torch.equal(block.take(whole), local)), None)
    if found is not None or len(cut) > 2:
        return found
    # A block along one dim and slices along the other: rows of a data rank, non-consecutive positions of a ring.
    for dim, cross_dim in (cut, cut[::-1]):
        for block in box_candidates(name, local.shape, whole.shape, [dim]):
            if block.index[dim] is not None and (piece := _find_slices(name, local, block.take(whole), cross_dim)):
                return Part(name, tuple(b if d == dim else p for d, (b, p) in
                                        enumerate(zip(block.index, piece.index, strict=True))))  # fmt: skip
    return None


def _find_slices(name: str, local: Tensor, whole: Tensor, dim: int) -> Part | None:
    """Find slices along one dim, in any order. Slices after the last match are padding."""
    places: dict[bytes, list[int]] = {}
    for position, piece in enumerate(whole.unbind(dim)):
        # By bits: 0.0 and -0.0 differ, and NaN is equal to itself. A dictionary, since comparing all pairs of slices of
        # a vocabulary would take hours.
        places.setdefault(bytes(bytes_of(piece)), []).append(position)
    index: list[int] = []
    for piece in local.unbind(dim):
        candidates = places.get(bytes(bytes_of(piece)), [PADDING])
        following = index[-1] + 1 if index else 0  # of equal slices, the next in order is taken
        index.append(following if following in candidates else candidates[0])
    found = [i for i in index if i != PADDING]
    # Padding is only at the end; an unknown slice in the middle is wrong.
    if local.shape[dim] and (not found or PADDING in index[: len(found)]):
        return None
    return Part(name, tuple(tuple(index) if d == dim else None for d in range(whole.ndim)))


def parts_alike(name: str, local: Tensor, whole: Tensor) -> list[Part]:
    """Return all parts of `whole` with the values of `local`, since equal slices cannot be distinguished.

    Example: the numbers of documents, if documents are packed equally in all rows.
    """
    cut = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    if local.ndim == 1 and cut and local.numel():
        starts = (whole.unfold(0, local.numel(), 1) == local).all(1).nonzero().flatten().tolist()
        return [Part(name, (tuple(range(start, start + local.numel())),)) for start in starts]
    if len(cut) != 1:
        blocks = box_candidates(name, local.shape, whole.shape, cut)
        return [block for block in blocks if torch.equal(block.take(whole), local)]
    held = {bytes(bytes_of(piece)) for piece in local.unbind(cut[0])}
    index = tuple(position for position, piece in enumerate(whole.unbind(cut[0])) if bytes(bytes_of(piece)) in held)
    return [Part(name, tuple(index if dim == cut[0] else None for dim in range(whole.ndim)))]


def box_candidates(name: str, local: Sequence[int], whole: Sequence[int], cut: Sequence[int]) -> list[Part]:
    """Return all blocks of a local shape in a whole shape: at multiples of the size along `cut`, and at the ends."""
    if any(not 0 < local[dim] <= whole[dim] for dim in cut):
        return []
    last = {dim: whole[dim] - local[dim] for dim in cut}
    # The last start is included: if the size does not divide the dim, the last block still ends with the dim.
    starts = product(*(sorted({*range(0, last[dim] + 1, local[dim]), last[dim]}) for dim in cut))
    return [
        Part(name, tuple(
            tuple(range(start[cut.index(d)], start[cut.index(d)] + local[d])) if d in cut else None
            for d in range(len(whole))
        ))
        for start in starts
    ]  # fmt: skip


def _find_flat(name: str, local: Tensor, whole: Tensor) -> Part | None:
    """Find a run of the flattened parameter."""
    flat, size = whole.flatten(), local.numel()
    if size == 0:
        return Part(name, ((),), flat=True)
    # Whole runs are compared only at places with an equal first element.
    for start in (flat[: flat.numel() - size + 1] == local[0]).nonzero().flatten().tolist():
        if torch.equal(flat[start : start + size], local):
            return Part(name, (tuple(range(start, start + size)),), flat=True)
    return None


def box_part(name: str, offsets: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> Part:
    """Return the box at `offsets` of a tensor of shape `whole` as a part."""
    index = tuple(
        None if size == length else tuple(range(offset, offset + size))
        for offset, size, length in zip(offsets, sizes, whole, strict=True)
    )
    return Part(name, index)


def missing_places(parts: Sequence[Part], shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape that no part holds."""
    covered = torch.zeros(tuple(shape), dtype=torch.bool)
    for shard in parts:
        if shard.whole:
            return 0
        view = covered.view(-1) if shard.flat else covered
        indices = [list(range(n)) if i is None else [j for j in i if j != PADDING]
                   for i, n in zip(shard.index, view.shape, strict=True)]  # fmt: skip
        if all(indices):
            # The outer product of the dims' indices: a part is a block, possibly with gaps along each dim.
            view[torch.meshgrid(*(torch.tensor(i) for i in indices), indexing="ij")] = True
    return int((~covered).sum())
