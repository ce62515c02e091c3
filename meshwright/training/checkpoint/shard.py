"""A rank's shard: a safetensors file with a hash of every block of every tensor in the header.

A block's hash (parameters/root.py) covers the elements and their places in the whole tensor. The hashes of all shards
sum to the checkpoint's root, so one pass computes both. The header's own SHA-256 is in the manifest. A reader checks
only the header and the blocks that it reads: a rank that reads a thousandth of a checkpoint hashes about a thousandth.
Each block is read once, into memory, so that the checked bytes are the used bytes. Shards of format 3 have a SHA-256 of
every 256 KiB. Shards of formats 1 and 2 have no hashes of blocks, and are hashed whole before the first byte is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.compute.parameters.root import block_bounds, block_hashes
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.errors import DamagedError
from meshwright.ranks.foreign import open_plain, open_unbuffered, parse_json
from meshwright.training.checkpoint.manifest import GET_ANOTHER, MANIFEST, StoredFile, StoredRun, stored_file

READ_BYTES = 2**24
"""Bytes of a part. A part is hashed while a thread reads the next part. Parts are long, since the hand-over between
threads takes as long as reading 1 MiB."""
_HASHES, _DIGESTS = "hashes", "sha256"
"""The metadata keys of hashes and of format 3's digests: by tensor, hexadecimal, concatenated."""
_DIGEST_BYTES = 2**18
"""Bytes covered by a digest of format 3."""
_DIGITS, _HEXADECIMAL = 16, "{:016x}"
"""Hexadecimal digits of a block's hash, and its text."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor on the host, to be written under `key`: elements of a box, row by row from number `first` on.
    The box is part of a tensor `name` (`weight of NAME`) with the shape `shape`."""

    key: str
    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    first: int = 0

    @property
    def bounds(self) -> list[int]:
        """Return the number of each block's first element, and the number of elements."""
        return block_bounds(self.shape, self.box, self.first, self.tensor.numel(), self.tensor.element_size())

    def hashes(self) -> list[int]:
        """Compute the blocks' hashes."""
        # A tensor of one element may have any stride, and torch then refuses to read the bytes.
        flat = self.tensor.as_strided((self.tensor.numel(),), (1,))
        return block_hashes(self.name, self.shape, self.box, self.first, flat)


def write_shard(path: Path, parts: Sequence[Stored]) -> tuple[StoredFile, int]:
    """Write tensors; return the file's entry for the manifest, and the sum of the tensors' hashes.

    The header is first written with zeros. The hashes are computed meanwhile, and then written over the zeros.
    """
    zeros = {stored.key: "0" * _DIGITS * (len(stored.bounds) - 1) for stored in parts}
    assert len(zeros) == len(parts), f"{path} would hold a tensor twice"
    # One metadata key, since safetensors orders several at random.
    metadata = {_HASHES: json.dumps(zeros)}
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(save_file, {stored.key: stored.tensor for stored in parts}, path, metadata=metadata)
        hashes = {stored.key: stored.hashes() for stored in parts}
        written.result()
    found = {key: "".join(map(_HEXADECIMAL.format, numbers)) for key, numbers in hashes.items()}
    with path.open("r+b") as stream:
        start = stream.read(_LENGTH_BYTES)
        header = stream.read(int.from_bytes(start, "little"))
        before, after = (json.dumps(json.dumps(each)).encode() for each in (zeros, found))
        assert header.count(before) == 1, f"{path} has no place for hashes"
        header = header.replace(before, after)
        stream.seek(_LENGTH_BYTES)
        stream.write(header)
    digest = hashlib.sha256(start + header).hexdigest()
    entry = StoredFile(path.name, path.stat().st_size, digest, _LENGTH_BYTES + len(header))
    return entry, sum(map(sum, hashes.values()))


@dataclass(frozen=True)
class BadBlock:
    """Bytes first..last of a shard's tensor `key`, with another hash than the written one."""

    path: Path
    key: str
    first: int
    last: int


@dataclass(frozen=True)
class _Checks:
    """The blocks of a stored tensor. `bounds`: each block's first byte, then the tensor's size. `hashes(first,
    content)`: the hashes of the blocks in `content`, from block `first` on. `written`: the header's hashes."""

    bounds: Sequence[int]
    hashes: Callable[[int, memoryview], list[str]]
    written: Sequence[str]


class StoredShard:
    """An open shard with a checked header. Methods raise DamagedError if bytes differ from the written bytes.

    `held`: the runs with a part in the file, and the part's number. `bad`: a list that collects bad blocks, for a
    reader that lists all damage; None: raise. Formats 1 and 2 have no hashes of blocks, and always raise.
    """

    def __init__(
        self,
        path: Path,
        file: StoredFile,
        held: Iterable[tuple[StoredRun, int]] = (),
        bad: list[BadBlock] | None = None,
    ) -> None:
        self.path = path
        self._held = {run.key: (run, slice_index) for run, slice_index in held}
        self._bad = bad
        self._whole = file.header_bytes is None
        """Whether the whole file was hashed (formats 1 and 2)."""
        damaged = f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {GET_ANOTHER}"
        try:
            if self._whole and stored_file(path) != file:
                raise DamagedError(damaged)
            with open_plain(path) as stream:
                start = stream.read(_LENGTH_BYTES)
                # A damaged length could exceed the available memory.
                length = min(int.from_bytes(start, "little"), file.size_bytes)
                header = stream.read(length if file.header_bytes is None else file.header_bytes - _LENGTH_BYTES)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {GET_ANOTHER}") from error
        if not self._whole and hashlib.sha256(start + header).hexdigest() != file.sha256:
            raise DamagedError(damaged)
        self._data = _LENGTH_BYTES + len(header)
        try:
            self._header = dict(parse_json(header))
            metadata = dict(self._header.pop("__metadata__", {}))
            self._hashes, self._digests = (dict(parse_json(metadata.get(key, "{}"))) for key in (_HASHES, _DIGESTS))
        except (ValueError, TypeError) as error:
            raise DamagedError(f"{path} holds no header that can be read: {error}; {GET_ANOTHER}") from error

    def check(self, known: Collection[str] = ()) -> None:
        """Check every byte, except of tensors with keys in `known`."""
        for key in (key for key in self._header if key not in known):
            begin, end, _ = self._place(key)
            for _ in self._read(key, begin, 0, end - begin, self._blocks(key, *self._held.get(key, ()))):
                pass

    def elements(
        self, run: StoredRun, slice_index: int, begin: int, end: int, out: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, values) of each block with elements begin..end of this file's part of a run.

        Values are valid until the next block is requested. `out` [end - begin]: blocks inside of begin..end are read
        directly into `out`.
        """
        blocks, size = self._blocks(run.key, run, slice_index), run.torch_dtype.itemsize
        first, _, _ = self._place(run.key)
        into = None if out is None else memoryview(out.view(torch.uint8).numpy().data)
        for start, content in self._read(run.key, first, begin * size, end * size, blocks, into):
            yield start // size, torch.frombuffer(content, dtype=run.torch_dtype)

    def _blocks(self, key: str, run: StoredRun | None = None, slice_index: int = 0) -> _Checks:
        """Return the blocks of a tensor, which is the slice `slice_index` of a run."""
        begin, end, dtype = self._place(key)
        size, wanted = end - begin, range(0) if run is None else range(*run.bounds(slice_index))
        if run and (dtype != run.torch_dtype or size != len(wanted) * run.torch_dtype.itemsize):
            holds = f"{size} bytes of {str(dtype).removeprefix('torch.')}"
            needs = f"{len(wanted) * run.torch_dtype.itemsize} of {run.dtype}"
            raise DamagedError(f"{self.path}: {key} is {holds}, not {needs}; {GET_ANOTHER}")
        if self._whole:
            return _Checks([*range(0, size, READ_BYTES), size], lambda first, content: [], ())
        if self._digests:
            return _Checks(
                [*range(0, size, _DIGEST_BYTES), size],
                lambda first, content: [
                    hashlib.sha256(content[start : start + _DIGEST_BYTES]).hexdigest()
                    for start in range(0, len(content), _DIGEST_BYTES)
                ],
                re.findall(".{1,64}", str(self._digests.get(key))),
            )
        if run is None:
            raise DamagedError(f"{self.path} holds {key}, which no run in {MANIFEST} names; {GET_ANOTHER}")
        location, element = (f"{run.kind} of {run.parameter}", run.shape, run.box), run.torch_dtype
        bounds = block_bounds(run.shape, run.box, wanted.start, len(wanted), element.itemsize)
        return _Checks(
            [element.itemsize * bound for bound in bounds],
            lambda first, content: [
                _HEXADECIMAL.format(digest)
                for digest in block_hashes(
                    *location, wanted.start + bounds[first], torch.frombuffer(content, dtype=element)
                )
            ],
            re.findall(f".{{1,{_DIGITS}}}", str(self._hashes.get(key))),
        )

    def _place(self, key: str) -> tuple[int, int, torch.dtype | str]:
        """Return a tensor's first byte after the header, the byte after the last, and the dtype."""
        try:
            entry = self._header[key]
            first, last = entry["data_offsets"]
            if not 0 <= int(first) <= int(last):
                raise ValueError(f"it lies at {first}..{last}")
            return int(first), int(last), _DTYPES.get(entry["dtype"], str(entry["dtype"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{self.path} holds no {key} that can be read: {error!r}; {GET_ANOTHER}") from error

    def _read(
        self, key: str, first: int, begin: int, end: int, blocks: _Checks, into: memoryview | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield bytes begin..end of the tensor at `first`, in whole checked blocks. `into`: memory for exactly these
        bytes; blocks that do not fit in it use two buffers in turn, so a part is valid until the next but one."""
        bounds, last = blocks.bounds, bisect_left(blocks.bounds, end)
        starts = [bisect_right(bounds, begin) - 1]
        while starts[-1] < last:
            behind = bisect_right(bounds, bounds[starts[-1]] + READ_BYTES) - 1
            starts.append(min(last, max(starts[-1] + 1, behind)))
        spans = list(pairwise(starts))
        inside = [into is not None and begin <= bounds[start] and bounds[stop] <= end for start, stop in spans]
        sizes = [bounds[stop] - bounds[start] for start, stop in spans]
        used = [size for size, within in zip(sizes, inside, strict=True) if not within]
        rooms = cycle([memoryview(bytearray(max(used))) for _ in used[:2]])
        memory = [
            into[bounds[start] - begin : bounds[stop] - begin] if into is not None and within else next(rooms)[:size]
            for (start, stop), within, size in zip(spans, inside, sizes, strict=True)
        ]
        parts = read_parts(self.path, key, [self._data + first + bounds[start] for start, _ in spans], memory)
        for (first_block, _), content in zip(spans, parts if len(spans) < 2 else ahead(parts), strict=True):
            for block, found in enumerate(blocks.hashes(first_block, content), first_block):
                if blocks.written[block : block + 1] != [found]:
                    start, stop = bounds[block], bounds[block + 1]
                    if self._bad is None:
                        damage = f"bytes {start:,} to {stop - 1:,} of {key} are not those that were written"
                        raise DamagedError(f"{self.path} is damaged: {damage}; {GET_ANOTHER}")
                    self._bad.append(BadBlock(self.path, key, start, stop - 1))
            yield bounds[first_block], content


def read_parts(path: Path, key: str, starts: Sequence[int], memory: Sequence[memoryview]) -> Iterator[memoryview]:
    """Read a file's bytes from each start into the memory for that start. Raises DamagedError, naming the tensor `key`,
    if the file ends early."""
    with open_unbuffered(path) as stream:
        for start, content in zip(starts, memory, strict=True):
            try:
                stream.seek(start)
                got = stream.readinto(content)
            except OSError as error:
                raise DamagedError(f"{path} cannot be read: {error.strerror}; {GET_ANOTHER}") from error
            if got != len(content):
                raise DamagedError(f"{path} holds no {key} that can be read: it ends early; {GET_ANOTHER}")
            yield content


def ahead(values: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the values; a thread computes each value while the caller uses the previous one."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, values, None)
        while (value := coming.result()) is not None:
            coming = pool.submit(next, values, None)
            yield value
