"""Tensors by name in one file, written whole or not at all, and read one by one.

The format is safetensors': eight bytes with the length of a header, the header as JSON (type, shape and place by name),
and the tensors' bytes. It takes so few lines that a package of parity alone needs no library for it.
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
    """A host tensor's bytes in the order of its elements, in its own memory if it is contiguous."""
    # Of a single element torch keeps any stride, calls it contiguous, and then refuses to read its bytes.
    return x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device and strides. Raises OSError; then `path` is as it was before."""
    # The widest first, so that each lies at a multiple of its elements' size.
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
    """A file of tensors, mapped into memory: each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        with open_plain(path) as file:
            # Copied on write: torch takes no memory that cannot be written to.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._begin = 8 + int.from_bytes(self._bytes[:8], "little")
        self._header = parse_json(self._bytes[8 : self._begin])
        self.keys = set(self._header) - {"__metadata__"}

    def get(self, key: str) -> Tensor:
        """A tensor on the CPU, which shares the file's memory."""
        facts = self._header[key]
        start, end = facts["data_offsets"]
        dtype = TYPES[facts["dtype"]]
        if start == end:
            return torch.empty(facts["shape"], dtype=dtype)
        flat = torch.frombuffer(
            self._bytes, dtype=dtype, count=(end - start) // dtype.itemsize, offset=self._begin + start
        )
        return flat.view(facts["shape"])
