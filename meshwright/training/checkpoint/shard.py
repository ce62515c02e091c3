"""A rank's shard: a safetensors file whose header has a hash of every block of its tensors.

A block's hash (parameters/root.py) is of its elements and their places in the whole tensor, so that the hashes of all
shards add up to the checkpoint's root: one pass serves both. The header's own SHA-256 is in the manifest. So a reader
checks only the header and the blocks it reads: a rank that reads a thousandth of a checkpoint hashes about as much.
Each block is read once, into memory, so that the checked bytes are the used ones. Shards of format 3 have a SHA-256 of
every 256 KiB. Those of formats 1 and 2 have no hashes of blocks; they are hashed whole before the first byte is used.
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
"""Bytes of a part, which is hashed at once while a thread reads the next one. Handing over a part takes as long as
reading a MiB, so parts are long."""
_HASHES, _DIGESTS = "hashes", "sha256"
"""The metadata keys of hashes and of format 3's digests: by tensor, hexadecimal, concatenated."""
_DIGEST_BYTES = 2**18
"""Bytes that a digest of format 3 is of."""
_DIGITS, _HEXADECIMAL = 16, "{:016x}"
"""Hexadecimal digits of a block's hash, and its text."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor on the host, to be written under `key`: the elements from number `first` on, row by row, of
    a box of a tensor `name` (`weight of NAME`) that has the shape `shape`."""

    key: str
    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    first: int = 0

    @property
    def bounds(self) -> list[int]:
        """The numbers of the first elements of its blocks, and of its elements."""
        return block_bounds(self.shape, self.box, self.first, self.tensor.numel(), self.tensor.element_size())

    def hashes(self) -> list[int]:
        """The hashes of the blocks."""
        # Of a single element torch keeps any stride, and then refuses to read its bytes.
        flat = self.tensor.as_strided((self.tensor.numel(),), (1,))
        return block_hashes(self.name, self.shape, self.box, self.first, flat)


def write_shard(path: Path, parts: Sequence[Stored]) -> tuple[StoredFile, int]:
    """Write tensors; returns the file's entry for the manifest, and the sum of their hashes.

    The header is written with zeros for hashes, which are computed meanwhile and then take their place.
    """
    zeros = {part.key: "0" * _DIGITS * (len(part.bounds) - 1) for part in parts}
    assert len(zeros) == len(parts), f"{path} would hold a tensor twice"
    # Of one metadata key: safetensors orders several at random.
    metadata = {_HASHES: json.dumps(zeros)}
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(save_file, {part.key: part.tensor for part in parts}, path, metadata=metadata)
        hashes = {part.key: part.hashes() for part in parts}
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
    """Bytes first..last of a shard's tensor `key` that have not the hash that was written."""

    path: Path
    key: str
    first: int
    last: int


@dataclass(frozen=True)
class _Checks:
    """The blocks of a stored tensor: their first bytes, then its size, and `hashes(first, content)`: of the blocks from
    number `first` on that content holds. `written`: the right ones, in the header."""

    bounds: Sequence[int]
    hashes: Callable[[int, memoryview], list[str]]
    written: Sequence[str]


class StoredShard:
    """An open shard with a checked header. Methods raise DamagedError if bytes are not those written.

    `held`: the runs that have a part in the file, and the part's number. `bad`: a list that collects bad blocks
    instead, for a reader that names damage and goes on (formats 1 and 2 have no hashes of blocks, and still raise).
    """

    def __init__(
        self,
        path: Path,
        file: StoredFile,
        held: Iterable[tuple[StoredRun, int]] = (),
        bad: list[BadBlock] | None = None,
    ) -> None:
        self.path = path
        self._held = {run.key: (run, part) for run, part in held}
        self._bad = bad
        self._whole = file.header_bytes is None
        """Whether the whole file was hashed (formats 1 and 2)."""
        damaged = f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {GET_ANOTHER}"
        try:
            if self._whole and stored_file(path) != file:
                raise DamagedError(damaged)
            with open_plain(path) as stream:
                start = stream.read(_LENGTH_BYTES)
                # A damaged length could ask for more memory than there is.
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
        """Check every byte, except of the tensors whose keys are `known`."""
        for key in (key for key in self._header if key not in known):
            begin, end, _ = self._place(key)
            for _ in self._read(key, begin, 0, end - begin, self._blocks(key, *self._held.get(key, ()))):
                pass

    def elements(
        self, run: StoredRun, part: int, begin: int, end: int, out: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Elements begin..end of this file's part of a run: (first element, values) of the blocks that hold them.
        Values are valid until the next ones are asked for. `out` [end - begin]: blocks inside of it are read into it.
        """
        blocks, size = self._blocks(run.key, run, part), run.torch_dtype.itemsize
        first, _, _ = self._place(run.key)
        into = None if out is None else memoryview(out.view(torch.uint8).numpy().data)
        for start, content in self._read(run.key, first, begin * size, end * size, blocks, into):
            yield start // size, torch.frombuffer(content, dtype=run.torch_dtype)

    def _blocks(self, key: str, run: StoredRun | None = None, part: int = 0) -> _Checks:
        """The blocks of a tensor, which is the `part` of a run."""
        begin, end, dtype = self._place(key)
        size, wanted = end - begin, range(0) if run is None else range(*run.bounds(part))
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
        place, element = (f"{run.kind} of {run.parameter}", run.shape, run.box), run.torch_dtype
        bounds = block_bounds(run.shape, run.box, wanted.start, len(wanted), element.itemsize)
        return _Checks(
            [element.itemsize * bound for bound in bounds],
            lambda first, content: [
                _HEXADECIMAL.format(number)
                for number in block_hashes(
                    *place, wanted.start + bounds[first], torch.frombuffer(content, dtype=element)
                )
            ],
            re.findall(f".{{1,{_DIGITS}}}", str(self._hashes.get(key))),
        )

    def _place(self, key: str) -> tuple[int, int, torch.dtype | str]:
        """A tensor's first byte after the header, its end, and its dtype."""
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
        """Bytes begin..end of the tensor at `first`, in whole blocks that were checked: in `into`, the memory for these
        bytes, or in memory that is used again for the part behind the next one."""
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
        for (number, _), content in zip(spans, parts if len(spans) < 2 else ahead(parts), strict=True):
            for block, found in enumerate(blocks.hashes(number, content), number):
                if blocks.written[block : block + 1] != [found]:
                    start, stop = bounds[block], bounds[block + 1]
                    if self._bad is None:
                        place = f"bytes {start:,} to {stop - 1:,} of {key} are not those that were written"
                        raise DamagedError(f"{self.path} is damaged: {place}; {GET_ANOTHER}")
                    self._bad.append(BadBlock(self.path, key, start, stop - 1))
            yield bounds[number], content


def read_parts(path: Path, key: str, starts: Sequence[int], memory: Sequence[memoryview]) -> Iterator[memoryview]:
    """A file's bytes from each start on, in its memory. Raises DamagedError where they are not there; `key`: whose."""
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
    """The values, each made by a thread while the one before is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, values, None)
        while (value := coming.result()) is not None:
            coming = pool.submit(next, values, None)
            yield value
