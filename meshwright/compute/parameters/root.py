"""The root: one number of a run's state, the same under every layout that holds the same bits.

Each element has a hash of its bits, its place in its tensor and the tensor's name (the finalizer of MurmurHash3, 64
bits). A tensor's hash is their sum modulo 2^64, and the root the sum of the tensors': whoever holds a piece adds up its
elements, in any order, and copies are left out. Two states that differ have one root in 2^64 cases by chance; it finds
faults and mistakes, and keeps out nobody who means harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Place
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.mesh import Mesh

FIRST, SECOND, STEP = (number - 2**64 for number in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15))
BLOCK = 2**20
UPPER = 2**31 - 1
"""The bits that a shift by 33 leaves of 64 without a sign."""
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def box_hash(name: str, shape: tuple[int, ...], box: Box, values: Tensor) -> Tensor:
    """The sum of the hashes of a box's elements, an int64 scalar. values [n]: the box's, row by row."""
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for size, offset, length in zip(shape, box.offsets, box.lengths, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(offset, offset + length, device=values.device)
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    bits = values.contiguous().view(BITS[values.element_size()]).to(torch.int64)
    mixed = index.flatten().add_(1).mul_(STEP).add_(salt).bitwise_xor_(bits)
    for factor in (FIRST, SECOND):
        mixed = (mixed ^ (mixed >> 33 & UPPER)).mul_(factor)
    return (mixed ^ (mixed >> 33 & UPPER)).sum()


def elements_hash(name: str, shape: tuple[int, ...], box: Box, start: int, values: Tensor) -> Tensor:
    """The sum of the hashes of a box's elements start ... start + n - 1, counted row by row, an int64 scalar; values
    [n]. Takes 24 bytes of memory an element, of BLOCK elements at a time."""
    total = torch.zeros((), dtype=torch.int64)
    for first in range(0, values.numel(), BLOCK):
        position, end = first, min(first + BLOCK, values.numel())
        for part in box.flat_parts(start + first, start + end):
            total += box_hash(name, shape, part, values[position : position + part.num_elements])
            position += part.num_elements
    return total


def held_hashes(
    tensors: Iterable[tuple[str, Tensor, Collection[Place], Collection[str]]], mesh: Mesh
) -> dict[str, Tensor]:
    """By kind and parameter, the hash of what this rank holds and no rank before it.

    `tensors`: kind, values [n], what lies where in them, and the axes whose ranks hold the same.
    """
    found: dict[str, Tensor] = {}
    for kind, values, places, copy_axes in tensors:
        if any(mesh.index(axis) for axis in copy_axes):
            continue
        for place in places:
            name = f"{kind} of {place.name}"
            part = box_hash(name, place.shape, place.box, values[place.start : place.stop])
            found[name] = found[name] + part if name in found else part
    return found


def order_root(data: str, seed: int, first: int, sample: Mapping[str, Tensor]) -> str:
    """The root of a run's order of data, as 16 hexadecimal digits. `data`: the prepared data's fingerprint; `first`:
    the number of samples seen; `sample`: the next one's tensors, by name, which the order has chosen and drawn."""
    digest = hashlib.sha256(f"{data}/{seed}/{first}".encode())
    for name in sorted(sample):
        values = sample[name].contiguous()
        digest.update(f"/{name}/{tuple(values.shape)}/{values.dtype}/".encode())
        # Of a single element torch keeps any stride, and then refuses to read its bytes.
        digest.update(values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def root_text(hashes: Iterable[int]) -> str:
    """The root of tensors' hashes, or of the ranks' sums of them, as 16 hexadecimal digits."""
    return f"{sum(hashes) % 2**64:016x}"
