"""The root: a 64-bit hash of a run's state, equal under every layout with equal bits.

A tensor is a matrix of 32-bit words: one row for each index of the leading dims, cut into segments of SEGMENT words.
Each segment w has COLUMNS sums w · k, with k a column of fixed random integers. The products are computed in float64
and are exact: |w · k| <= 2^31 · 2^9 · SEGMENT < 2^53. Each sum is multiplied by a fixed odd factor of the column and an
odd factor of the segment, which also depends on the tensor's name. The tensor's hash is the total modulo 2^64. The root
is the sum of the tensors' hashes. Hashes are linear: each rank hashes its pieces, hashes of pieces are added, and
copies are left out.

Two different states have equal roots with a probability of 2^-64, or 2^-33 if only the highest bits of words differ.
The root detects faults and mistakes. The factors are public, so the root is no protection against an attacker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Place
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.mesh import Mesh

VERSION = "2-"
"""The prefix of a root. Roots of different versions are not compared; roots of version 1 have no prefix."""
WORD_BYTES = 4
SEGMENT = 4096
COLUMNS = 8
KEY_BITS = 10
ROW_ELEMENTS = 256
"""The fewest elements of a row. A row covers the fewest trailing dims with this number of elements."""
BLOCK_BYTES = 2**18
"""Bytes of a block. A reader of a few rows reads at most one more block at each end."""
CHUNK_WORDS = {"cpu": 2**17, "cuda": 2**22}
"""Words converted to float64 at a time, by type of device; on a CPU few enough for a core's cache."""
GAPPED_ELEMENTS = 2**20
"""The most elements to hash at a time if the box has gaps in the tensor's rows."""
FIRST, SECOND, STEP = (constant - 2**64 for constant in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15))
UPPER = 2**31 - 1
"""Mask that makes an arithmetic shift by 33 a logical shift."""


def mixed(numbers: Tensor) -> Tensor:
    """Hash int64 numbers: multiply by STEP, then apply the 64-bit finalizer of MurmurHash3."""
    numbers = numbers * STEP
    for factor in (FIRST, SECOND):
        numbers = (numbers ^ (numbers >> 33 & UPPER)) * factor
    return numbers ^ (numbers >> 33 & UPPER)


@cache
def factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the keys [SEGMENT, COLUMNS], float64 integers from -2^9 to 2^9 - 1, and the columns' odd factors."""
    numbers = mixed(torch.arange(1, (SEGMENT + 1) * COLUMNS + 1, device=device)).view(-1, COLUMNS)
    keys = (numbers[:SEGMENT] >> 64 - KEY_BITS).double()
    # Odd factors lose nothing modulo 2^64.
    return keys, numbers[SEGMENT] | 1


def row_dims(shape: Sequence[int]) -> int:
    """Return the number of leading dims that index rows. The trailing dims have at least ROW_ELEMENTS elements.

    0 if the tensor has fewer elements: the tensor is then one row.
    """
    return next((dim for dim in reversed(range(len(shape))) if math.prod(shape[dim:]) >= ROW_ELEMENTS), 0)


def row_hashes(name: str, shape: tuple[int, ...], box: Box, values: Tensor) -> Tensor:
    """Hash the rows of a box.

    Args:
        name: the tensor's name.
        shape: the shape of the whole tensor.
        box: the part of the tensor.
        values: [n], the elements of the box in row-major order.

    Returns: [R], int64 on the device of `values`.
    """
    split, device = row_dims(shape), values.device
    inner, lengths, offsets = shape[split:], box.lengths[split:], box.offsets[split:]
    gaps, row = lengths[1:] != inner[1:], math.prod(lengths)
    if gaps and (half := box.num_elements // row // 2 * row) and values.numel() > GAPPED_ELEMENTS:
        # The code below pads rows with zeros to the length of the tensor's rows; halves bound the memory.
        spans = ((0, half), (half, box.num_elements))
        halves = (elements_hashes(name, shape, box, first, values[first:last]) for first, last in spans)
        return torch.cat(list(halves))
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, offset, length in zip(shape[:split], box.offsets, box.lengths, strict=False):
        rows = (rows.unsqueeze(-1) * size + torch.arange(offset, offset + length, device=device)).flatten()
    total = torch.zeros_like(rows)
    if not values.numel():
        return total
    if not gaps:
        held = values.view(len(rows), -1)
        first = (offsets[0] if offsets else 0) * math.prod(inner[1:]) * values.element_size()
    else:  # zeros add nothing
        held, first = values.new_zeros(len(rows), *inner), 0
        held[(slice(None), *Box(offsets, lengths).slices)] = values.view(len(rows), *lengths)
    words, first = words_of(held.view(len(rows), -1), first), first // WORD_BYTES
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    in_row = -(-math.prod(inner) * values.element_size() // (SEGMENT * WORD_BYTES))
    end = first + words.shape[1]
    # A partial segment, whole segments, a partial segment.
    cuts = sorted({first, min(-(-first // SEGMENT) * SEGMENT, end), max(end // SEGMENT * SEGMENT, first), end})
    for start, stop in pairwise(cuts):
        segments = torch.arange(start // SEGMENT, -(-stop // SEGMENT), device=device)
        weights = mixed((rows.unsqueeze(-1) * in_row + segments).add_(salt)) | 1
        segment_words = words[:, start - first : stop - first].unflatten(1, (-1, min(SEGMENT, stop - start)))
        add_segments(total, segment_words, weights, start % SEGMENT)
    return total


def add_segments(total: Tensor, words: Tensor, weights: Tensor, first: int) -> None:
    """Add the hashes of segments to the hashes of rows.

    Args:
        total: [R], the rows' hashes; changed in place.
        words: [R, S, W] int32, the words of S segments per row.
        weights: [R, S], the segments' odd factors.
        first: index of the first word within each segment.
    """
    keys, columns = factors(words.device)
    rows, count, width = words.shape
    keys, chunk = keys[first : first + width], CHUNK_WORDS[words.device.type]
    across = max(1, min(count, chunk // width))
    down = max(1, chunk // (across * width))
    sums = torch.empty(rows, count, COLUMNS, dtype=torch.float64, device=words.device)
    room = torch.empty(min(down, rows) * across * width, dtype=torch.float64, device=words.device)
    full = room.view(-1, across, width)
    for words_down, sums_down in zip(torch.split(words, down), torch.split(sums, down), strict=True):
        parts: Iterable[tuple[Tensor, Tensor]] = ((words_down, sums_down),)
        if across < count:  # of one row
            parts = zip(torch.split(words_down, across, 1), torch.split(sums_down, across, 1), strict=True)
        for here, there in parts:
            numbers = full if here.shape == full.shape else room[: here.numel()].view(here.shape)
            torch.mm(numbers.copy_(here).view(-1, width), keys, out=there.view(-1, COLUMNS))
    total += sums.long().mul_(columns).sum(2).mul_(weights).sum(1)


def words_of(rows: Tensor, first: int) -> Tensor:
    """View rows [R, n] as int32 words [R, W], padded with zeros. `first`: the byte of the whole row at the begin."""
    size = rows.element_size()
    before = first % WORD_BYTES
    after = -(before + rows.shape[1] * size) % WORD_BYTES
    if before or after or rows.storage_offset() * size % WORD_BYTES:
        rows = torch.nn.functional.pad(rows.view(torch.uint8), (before, after))
    return rows.view(torch.int32)


def elements_hashes(name: str, shape: tuple[int, ...], box: Box, start: int, values: Tensor) -> Tensor:
    """Hash the elements start ... start + n - 1 of a box, in row-major order.

    Args:
        name: the tensor's name.
        shape: the shape of the whole tensor.
        box: the part of the tensor.
        start: number of the first element in the box.
        values: [n], the elements.

    Returns: [R], int64, one hash for each row that has some of the elements.
    """
    hashes, position = [values.new_zeros(0, dtype=torch.int64)], 0
    for sub_box in box.flat_parts(start, start + values.numel()):
        hashes.append(row_hashes(name, shape, sub_box, values[position : position + sub_box.num_elements]))
        position += sub_box.num_elements
    return torch.cat(hashes)


def block_bounds(shape: tuple[int, ...], box: Box, start: int, count: int, element_bytes: int) -> list[int]:
    """Cut the elements start ... start + count - 1 of a box into blocks of at most BLOCK_BYTES.

    A block has whole rows if a row has at most BLOCK_BYTES. Returns the bounds of blocks relative to start, from 0 to
    `count`.
    """
    row = math.prod(box.lengths[row_dims(shape) :])
    step = BLOCK_BYTES // element_bytes
    step = step // row * row if 0 < row <= step else step
    return [0, *range(step - start % step, count, step), count] if count else [0]


def block_hashes(name: str, shape: tuple[int, ...], box: Box, start: int, values: Tensor) -> list[int]:
    """Hash each block of the elements start ... start + n - 1 of a box: integers from 0 to 2^64 - 1. values: [n]."""
    bounds = block_bounds(shape, box, start, values.numel(), values.element_size())
    row = math.prod(box.lengths[row_dims(shape) :])
    # Whole rows are hashed in blocks, each in one pass, since the overhead of a call is the time of 100 KiB.
    whole = [first % row == 0 and last % row == 0 for first, last in pairwise(start + bound for bound in bounds)]
    sums = [values.new_zeros(0, dtype=torch.int64)]
    for is_whole, group in groupby(zip(whole, pairwise(bounds), strict=True), lambda pair: pair[0]):
        spans = [span for _, span in group]
        if is_whole:
            hashes = elements_hashes(name, shape, box, start + spans[0][0], values[spans[0][0] : spans[-1][1]])
            # Differences of the cumulative sums at the ends of blocks, exact modulo 2^64.
            ends = torch.tensor([(last - spans[0][0]) // row - 1 for _, last in spans], device=values.device)
            upto = hashes.cumsum(0)[ends]
            sums.append(torch.cat((upto[:1], upto.diff())))
        else:
            parts = (elements_hashes(name, shape, box, start + first, values[first:last]) for first, last in spans)
            sums += (hashed.sum().view(1) for hashed in parts)
    return [digest % 2**64 for digest in torch.cat(sums).tolist()]


def held_hashes(
    tensors: Iterable[tuple[str, Tensor, Collection[Place], Collection[str]]], mesh: Mesh
) -> dict[str, Tensor]:
    """Hash this rank's state. Of several copies, only the first rank's is hashed.

    Args:
        tensors: (`weight` or a state's name, values [n], places of parameters in the values, axes with copies on all
            ranks).
        mesh: the ranks.

    Returns: the hash for each "state of parameter".
    """
    found: dict[str, Tensor] = {}
    for state_name, values, places, copy_axes in tensors:
        if any(mesh.index(axis) for axis in copy_axes):
            continue
        for region in places:
            name = f"{state_name} of {region.name}"
            digest = row_hashes(name, region.shape, region.box, values[region.start : region.stop]).sum()
            found[name] = found[name] + digest if name in found else digest
    return found


def order_root(data: str, seed: int, first: int, sample: Mapping[str, Tensor]) -> str:
    """Return the root of a run's order of data, 16 hexadecimal digits.

    Args:
        data: the fingerprint of the prepared data.
        seed: the run's seed.
        first: number of samples seen.
        sample: the tensors of the next sample, by name.
    """
    digest = hashlib.sha256(f"{data}/{seed}/{first}".encode())
    for name in sorted(sample):
        values = sample[name].contiguous()
        digest.update(f"/{name}/{tuple(values.shape)}/{values.dtype}/".encode())
        # A tensor of one element may have any stride, and torch then refuses to view the bytes.
        digest.update(values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def root_text(hashes: Iterable[int]) -> str:
    """Return the root of tensors' hashes, or of the ranks' sums of hashes: VERSION and 16 hexadecimal digits."""
    return f"{VERSION}{sum(hashes) % 2**64:016x}"


def comparable(*roots: str | None) -> bool:
    """Return True if all roots exist and have one version. Only then do different roots mean different states."""
    return None not in roots and len({str(root).rpartition("-")[0] for root in roots}) == 1
