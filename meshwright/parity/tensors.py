"""Files of named tensors, written atomically and read one tensor at a time.

The format is safetensors': eight bytes with the length of a header, the header as JSON (type, shape and place by name),
and the tensors' bytes. The few lines here save the stand-alone parity package a dependency.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.ranks.foreign import open_plain, parse_json

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a host tensor in the order of elements, without a copy if the tensor is contiguous."""
    # A tensor of one element may have any stride and is contiguous, but torch then refuses to view the bytes.
    return x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device and strides.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
    """
    # The widest types first, so that each tensor is aligned to the element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header, end = {}, 0
    for name, x in ordered.items():
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for x in ordered.values():
                file.write(bytes_of(x.cpu()))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class TensorFile:
    """A file of tensors, mapped into memory. `get` reads one tensor."""

    def __init__(self, path: Path) -> None:
        with open_plain(path) as file:
            # Copy on write, since torch accepts only writable memory.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._begin = 8 + int.from_bytes(self._bytes[:8], "little")
        self._header = parse_json(self._bytes[8 : self._begin])
        self.keys = set(self._header) - {"__metadata__"}

    def get(self, key: str) -> Tensor:
        """Return a tensor on the CPU that shares the memory of the mapped file."""
        facts = self._header[key]
        start, end = facts["data_offsets"]
        dtype = TYPES[facts["dtype"]]
        if start == end:
            return torch.empty(facts["shape"], dtype=dtype)
        flat = torch.frombuffer(
            self._bytes, dtype=dtype, count=(end - start) // dtype.itemsize, offset=self._begin + start
        )
        return flat.view(facts["shape"])
