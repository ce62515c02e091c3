"""Writers of torch's distributed checkpoints with transformers' names, and with torchtitan's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from meshwright.ranks.dcp import Shapes, save_tensors
from meshwright.training.convert.dcp import PAIRED, TORCHTITAN, head_size, pairs_of
from meshwright.training.convert.folder import Settings


def write_dcp(
    folder: Path, settings: Settings, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]
) -> None:
    """Write tensors by transformers' names; `settings` of config.json, further arguments as of `save_tensors`."""
    save_tensors(folder, shapes, tensors, copies)


def write_torchtitan(
    folder: Path, settings: Settings, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]
) -> None:
    """Write tensors of a Llama 3 or a Qwen3 as torchtitan does; arguments as of
    `write_dcp`.

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

    save_tensors(
        folder, {names[name]: shape for name, shape in shapes.items()}, renamed(),
        {names[copy]: names[source] for copy, source in copies.items()},
    )  # fmt: skip
