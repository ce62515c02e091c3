"""A writer of torch's distributed checkpoints (DCP), by torch's own `torch.distributed.checkpoint.save`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Streamed(DefaultSavePlanner):
    """A planner that reads each tensor when torch writes the tensor, so that one tensor is in memory."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.tensors, self.early = tensors, dict[str, Tensor]()

    def lookup_object(self, index: Any) -> Tensor:
        """Return the tensor of a name. Earlier tensors of the iterator are kept for their turn."""
        while index.fqn not in self.early:
            name, tensor = next(self.tensors)
            self.early[name] = tensor
        return self.early.pop(index.fqn)


def save_tensors(
    folder: Path, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]
) -> None:
    """Write tensors as a distributed checkpoint of one rank.

    Args:
        folder: An existing folder.
        shapes: By name, the shape and dtype.
        tensors: All tensors of `shapes`.
        copies: Further names, with the name of the equal tensor: in memory, a tied head has a name of its own.
    """

    def every() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            yield from ((copy, tensor) for copy, source in copies.items() if source == name)

    every_shape = dict(shapes) | {copy: shapes[source] for copy, source in copies.items()}
    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in every_shape.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(state, storage_writer=FileSystemWriter(folder), planner=Streamed(every()), no_dist=True)
