"""Comparison of two checkpoints: by all bytes, which are checked against the recorded digests, or by recorded roots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compute.parameters.root import comparable
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.errors import CheckpointError, DamagedError
from meshwright.training.checkpoint.merkle import CARRIED, ORDER
from meshwright.training.checkpoint.reader import Checkpoint
from meshwright.training.checkpoint.shard import BadBlock

ALL = "all tensors, by their roots"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """A tensor that differs between two checkpoints."""

    tensor: str
    """The tensor's name. Also the order of data, a file, a counter of the progress or a root, each as one element."""
    differing: int
    """The number of elements that differ."""
    elements: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    """Lowest and highest index per dimension among the differing elements."""

    @classmethod
    def single(cls, name: str) -> Part:
        """Return the difference of something that is no tensor."""
        return cls(name, 1, 1, (), ())

    @classmethod
    def between(cls, name: str, held: list[Tensor]) -> Part | None:
        """Return the differing part of a tensor, or None. `held`: the values of one or two checkpoints.

        If only one checkpoint has the tensor, or shapes or dtypes differ, all elements differ.
        """
        shape = held[0].shape
        if len(held) == 2 and held[0].shape == held[1].shape and held[0].dtype == held[1].dtype:
            # Compared as integers: a NaN equals itself, and 0.0 differs from -0.0.
            a, b = (value.view(_WORDS[value.element_size()]) for value in held)
            where = (a != b).nonzero()
            if not where.numel():
                return None
            first, last = where.amin(0).tolist(), where.amax(0).tolist()
            return cls(name, where.shape[0], shape.numel(), tuple(first), tuple(last))
        return cls(name, shape.numel(), shape.numel(), (0,) * len(shape), tuple(n - 1 for n in shape))


@dataclass(frozen=True)
class Damage:
    """Bytes in a checkpoint's file that are not the bytes that were written."""

    file: str
    tensor: str
    """`weight of NAME`; empty if no tensor can be named."""
    place: str
    """The bytes within the tensor's part in the file, or the reader's error text."""

    @classmethod
    def of(cls, block: BadBlock) -> Damage:
        state_name, _, name = block.key.partition("/")
        return cls(
            str(block.path), f"{state_name} of {name}", f"bytes {block.first:,} to {block.last:,} of its part there"
        )

    def __str__(self) -> str:
        if not self.tensor:
            return self.place
        return f"{self.file} is damaged: {self.tensor}, {self.place}, are not those that were written"


@dataclass(frozen=True)
class Compared:
    """Result of comparing two checkpoints of one step."""

    parts: tuple[Part, ...] = ()
    """The differences."""
    damages: tuple[Damage, ...] = ()
    """Damage in either checkpoint."""
    tensors: int = 0
    bytes: int = 0
    """Tensors and bytes that were read and compared."""
    undecided: str = ""
    """The reason why equality is not decided; empty if equality is."""


def by_bytes(first_folder: Path, second_folder: Path) -> Compared:
    """Read all bytes of two checkpoints, check the digests of both, and compare the tensors in the model's order."""
    bad: list[BadBlock] = []
    sides, damages = [], list[Damage]()
    for folder in (first_folder, second_folder):
        try:
            sides.append(Checkpoint(folder, bad))
        except CheckpointError as error:
            damages.append(Damage(str(folder), "", str(error)))
    if len(sides) < 2:
        # One cannot be opened. The other is read all the same, so that one call reports all damage.
        for side in sides:
            for parameter, state_name in side.manifest.parts:
                with suppress(DamagedError):  # damaged files are reported below
                    _read(side, parameter, state_name)
            damages += [Damage(str(side.folder), "", str(damage)) for damage in side.damage_besides()]
        return Compared(damages=(*damages, *map(Damage.of, bad)))
    parts, tensors, size, failed = list(_of_manifests(*sides)), 0, 0, dict[str, Damage]()
    for parameter, state_name in {**sides[0].manifest.parts, **sides[1].manifest.parts}:
        held = list[Tensor]()
        readable = True
        for side in sides:
            try:
                if (value := _read(side, parameter, state_name)) is not None:
                    held.append(value)
            except DamagedError as error:
                readable = False
                # One report per error text: each tensor of a damaged file raises the same one.
                failed.setdefault(str(error), Damage(str(side.folder), "", str(error)))
        tensors, size = tensors + 1, size + sum(value.nbytes for value in held)
        if readable and (mismatch := Part.between(f"{state_name} of {parameter}", held)) is not None:
            parts.append(mismatch)
    for side in sides:
        for damage in side.damage_besides():
            failed.setdefault(str(damage), Damage(str(side.folder), "", str(damage)))
    return Compared(tuple(parts), (*damages, *failed.values(), *map(Damage.of, bad)), tensors, size)


def by_roots(first_folder: Path, second_folder: Path) -> Compared:
    """Compare two checkpoints by the values recorded in the manifests; no shard is read."""
    try:
        sides = [Checkpoint(folder) for folder in (first_folder, second_folder)]
    except CheckpointError as error:
        return Compared(damages=(Damage("", "", str(error)),))
    parts, roots = list(_of_manifests(*sides)), [side.manifest.roots.state for side in sides]
    if None in roots:
        folder = sides[roots.index(None)].folder
        return Compared(tuple(parts), undecided=f"{folder} has no root of its tensors: leave out --roots to read them")
    if not comparable(*roots):
        both = f"{sides[0].folder} and {sides[1].folder}"
        return Compared(tuple(parts), undecided=f"{both} have roots of two versions: leave out --roots to read them")
    if roots[0] != roots[1]:
        parts.append(Part.single(ALL))
    return Compared(tuple(parts))


def _of_manifests(first_side: Checkpoint, second_side: Checkpoint) -> Iterator[Part]:
    """Yield the differences between two manifests: order of data, progress, and files that are no shards."""
    manifests = first_side.manifest, second_side.manifest
    data = [manifest.roots.data for manifest in manifests]
    if None not in data and data[0] != data[1]:
        yield Part.single(ORDER)
    for name in CARRIED:
        values = [vars(manifest.progress)[name] for manifest in manifests]
        if values[0] != values[1]:
            yield Part.single(f"{name} of the progress ({values[0]} and {values[1]})")
    # Shards are named after ranks, and layouts differ in ranks.
    rest = [
        {file.file: file.sha256 for file in each.files if not file.file.endswith(".safetensors")} for each in manifests
    ]
    for name in rest[0].keys() & rest[1].keys():
        if rest[0][name] != rest[1][name]:
            yield Part.single(f"the file {name}")


def _read(side: Checkpoint, parameter: str, state_name: str) -> Tensor | None:
    """Read a whole tensor; None if the checkpoint has no such tensor."""
    runs = side.manifest.parts.get((parameter, state_name))
    return None if runs is None else side.read(parameter, state_name, Box((0,) * len(runs[0].shape), runs[0].shape))
