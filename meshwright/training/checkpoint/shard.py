"""A rank's shard: a safetensors file whose header holds a SHA-256 of every block of its tensors.

The header's own SHA-256 is in the manifest. So a reader checks only the header and the blocks it reads: a rank that
reads a thousandth of a checkpoint hashes about as much. Each block is read once, into memory, so that the checked bytes
are the used ones. Shards of formats 1 and 2 have no such digests; they are hashed whole before the first byte is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.ranks.errors import DamagedError
from meshwright.ranks.foreign import open_plain, open_unbuffered, parse_json
from meshwright.training.checkpoint.manifest import GET_ANOTHER, MANIFEST, StoredFile, StoredRun, stored_file

BLOCK_BYTES = 2**18
"""Bytes of a block: a reader of a few rows reads at most so much more at each end. Digests add 1/4096 to a shard."""
READ_BYTES = 2**22
_DIGESTS = "sha256"
"""The metadata key of the digests: by tensor, hexadecimal, concatenated."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_shard(path: Path, tensors: dict[str, Tensor]) -> StoredFile:
    """Write contiguous host tensors; returns the file's entry for the manifest."""
    # Of a single element torch keeps any stride, and then refuses to read its bytes.
    flat = {key: tensor.as_strided((tensor.numel(),), (1,)) for key, tensor in tensors.items()}
    digests = {key: "".join(_digests(values.view(torch.uint8).numpy())) for key, values in flat.items()}
    save_file(tensors, path, metadata={_DIGESTS: json.dumps(digests)})  # safetensors orders several keys at random
    with open_plain(path) as stream:
        start = stream.read(_LENGTH_BYTES)
        header = start + stream.read(int.from_bytes(start, "little"))
    return StoredFile(path.name, path.stat().st_size, hashlib.sha256(header).hexdigest(), len(header))


def _digests(content: Any) -> Iterator[str]:
    """The SHA-256 of each block of a flat buffer."""
    for start in range(0, len(content), BLOCK_BYTES):
        yield hashlib.sha256(content[start : start + BLOCK_BYTES]).hexdigest()


@dataclass(frozen=True)
class BadBlock:
    """Bytes first..last of a shard's tensor `key` whose SHA-256 is not the written one."""

    path: Path
    key: str
    first: int
    last: int


class StoredShard:
    """An open shard with a checked header. Methods raise DamagedError if bytes are not those written.

    `bad`: a list that collects bad blocks instead, for a reader that names damage and goes on (formats 1 and 2 have no
    digests of blocks, and still raise).
    """

    def __init__(self, path: Path, file: StoredFile, bad: list[BadBlock] | None = None) -> None:
        self.path = path
        self._bad = bad
        self._damaged = f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {GET_ANOTHER}"
        try:
            # Formats 1 and 2: the whole file is hashed before a byte of it is used.
            if file.header_bytes is None and stored_file(path) != file:
                raise DamagedError(self._damaged)
            with open_plain(path) as stream:
                start = stream.read(_LENGTH_BYTES)
                # A damaged length could ask for more memory than there is.
                length = min(int.from_bytes(start, "little"), file.size_bytes)
                header = stream.read(length if file.header_bytes is None else file.header_bytes - _LENGTH_BYTES)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {GET_ANOTHER}") from error
        if file.header_bytes is not None and hashlib.sha256(start + header).hexdigest() != file.sha256:
            raise DamagedError(self._damaged)
        self._data = _LENGTH_BYTES + len(header)
        try:
            self._header = dict(parse_json(header))
            digests = dict(parse_json(dict(self._header.pop("__metadata__", {})).get(_DIGESTS, "{}")))
        except (ValueError, TypeError) as error:
            raise DamagedError(f"{path} holds no header that can be read: {error}; {GET_ANOTHER}") from error
        self._digests = digests if file.header_bytes is not None else None

    def check(self, known: Collection[str] = ()) -> None:
        """Check every byte, except of the tensors whose keys are `known`."""
        for key in (key for key in self._header if key not in known):
            begin, end, _ = self._place(key)
            for _ in self._read(key, begin, 0, end - begin, end - begin):
                pass

    def elements(self, run: StoredRun, part: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Elements begin..end of this file's part of a run: (first element, values) of the blocks that hold them."""
        first, last, dtype = self._place(run.key)
        wanted = range(*run.bounds(part))
        size = run.torch_dtype.itemsize
        if dtype != run.torch_dtype or last - first != len(wanted) * size:
            holds = f"{last - first} bytes of {str(dtype).removeprefix('torch.')}"
            needs = f"{len(wanted) * size} of {run.dtype}"
            raise DamagedError(f"{self.path}: {run.key} is {holds}, not {needs}; {GET_ANOTHER}")
        for start, content in self._read(run.key, first, begin * size, end * size, last - first):
            yield start // size, torch.frombuffer(content, dtype=dtype)

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

    def _read(self, key: str, first: int, begin: int, end: int, size: int) -> Iterator[tuple[int, bytearray]]:
        """Bytes begin..end of the tensor of `size` bytes at `first`, in whole blocks that were checked."""
        # Digests are of whole blocks, so whole blocks are read.
        start = begin // BLOCK_BYTES * BLOCK_BYTES
        stop = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, size)
        with open_unbuffered(self.path) as stream:
            for position in range(start, stop, READ_BYTES):
                content = bytearray(min(READ_BYTES, stop - position))
                try:
                    stream.seek(self._data + first + position)
                    got = stream.readinto(content)
                except OSError as error:
                    raise DamagedError(f"{self.path} cannot be read: {error.strerror}; {GET_ANOTHER}") from error
                if got != len(content):
                    raise DamagedError(f"{self.path} holds no {key} that can be read: it ends early; {GET_ANOTHER}")
                if self._digests is not None:
                    # 64 hexadecimal digits a block, one behind the other.
                    block = position // BLOCK_BYTES * 64
                    right = "".join(_digests(memoryview(content)))
                    written = str(self._digests.get(key))[block : block + len(right)]
                    if written != right:
                        if self._bad is None:
                            raise DamagedError(self._damaged)
                        for number in range(0, len(right), 64):
                            if written[number : number + 64] != right[number : number + 64]:
                                block_start = position + number // 64 * BLOCK_BYTES
                                block_end = min(block_start + BLOCK_BYTES, position + len(content))
                                self._bad.append(BadBlock(self.path, key, block_start, block_end - 1))
                yield position, content
