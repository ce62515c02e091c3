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

from meshwright.training.convert.dcp import PAIRED, TORCHTITAN, head_size, pairs_of
from meshwright.training.convert.folder import Settings

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


def write_dcp(folder: Path, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]) -> None:
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


def write_torchtitan(
    folder: Path, settings: Settings, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]
) -> None:
    """Write tensors of a Llama 3 or a Qwen3 as torchtitan does; arguments as of `write_dcp`.

    Raises CheckpointError for a tensor that torchtitan's Llama 3 and Qwen3 lack.
    """
    theirs = {hf: titan for titan, hf in TORCHTITAN.items()}
    names = {}
    for name in (*shapes, *copies):
        layer, _, kind = name.rpartition(".")
        number = next((part for part in layer.split(".") if part.isdigit()), "N")
        general = layer.replace(f".{number}.", ".N.")
        if general not in theirs or kind != "weight":
            raise settings.refused(f"{name} has no counterpart in torchtitan's Llama 3 and Qwen3")
        names[name] = f"{theirs[general].replace('.N.', f'.{number}.')}.{kind}"
    width, paired = head_size(settings), not any(".q_norm." in name for name in shapes)

    def renamed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            turned = paired and name.rpartition(".")[0].endswith(PAIRED)
            yield names[name], pairs_of(tensor, width) if turned else tensor

    write_dcp(
        folder, {names[name]: shape for name, shape in shapes.items()}, renamed(),
        {names[copy]: names[source] for copy, source in copies.items()},
    )  # fmt: skip
