"""Writers of torch's distributed checkpoints with transformers' names, and with torchtitan's; names: dcp.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.ranks.dcp import Shapes, save_tensors
from meshwright.training.convert.dcp import FUSED, GROUPED, PAIRED, TORCHTITAN, head_size, pairs_of
from meshwright.training.convert.folder import Settings

_EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_LINEARS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
"""Numbers of an expert's linears: gate, up, down."""


@dataclass(frozen=True)
class ExpertPlace:
    """The place of an expert's linear in the tensor of all experts."""

    whole: str
    """The tensor's name."""
    expert: int
    row: int
    """The first row."""


class JoinedExperts:
    """Joins the tensors of single experts of each block to tensors of all experts."""

    def __init__(self, shapes: Shapes, names: tuple[str, ...]) -> None:
        """`shapes`: of all tensors, by transformers' names of folders. `names`: FUSED or GROUPED."""
        self.places: dict[str, ExpertPlace] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in shapes.items():
            if (found := _EXPERT.fullmatch(name)) is None:
                self.shapes[name] = shape, dtype
                continue
            block, expert, linear = found[1], int(found[2]), _LINEARS[found[3]]
            both = names[0] == names[1] and linear < 2
            self.places[name] = ExpertPlace(f"{block}.{names[linear]}", expert, shape[0] * (both and linear == 1))
            count, *_ = self.shapes.get(self.places[name].whole, ((0,), dtype))[0]
            rows = shape[0] * (1 + both)
            self.shapes[self.places[name].whole] = (max(count, expert + 1), rows, *shape[1:]), dtype

    def joined(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, each of all experts after its last part; single experts' tensors follow one another."""
        parts = Counter(location.whole for location in self.places.values())
        wholes: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if (location := self.places.get(name)) is None:
                yield name, tensor
                continue
            shape, dtype = self.shapes[location.whole]
            whole = wholes.setdefault(location.whole, torch.empty(shape, dtype=dtype))
            whole[location.expert, location.row : location.row + tensor.shape[0]] = tensor
            parts[location.whole] -= 1
            if not parts[location.whole]:
                yield location.whole, wholes.pop(location.whole)


def write_dcp(
    folder: Path, settings: Settings, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]
) -> None:
    """Write tensors by the names of transformers' classes; `settings` of config.json, further arguments as of
    `save_tensors`, by the names of folders.
    """
    experts = JoinedExperts(shapes, FUSED)
    names = {name: name.replace(".block_sparse_moe.", ".mlp.") for name in experts.shapes}
    save_tensors(
        folder, {names[name]: shape for name, shape in experts.shapes.items()},
        ((names[name], tensor) for name, tensor in experts.joined(tensors)), copies,
    )  # fmt: skip


def write_torchtitan(
    folder: Path, settings: Settings, shapes: Shapes, tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]
) -> None:
    """Write tensors of a Llama 3 or a Qwen3, also with experts, as torchtitan does; arguments as of `write_dcp`.

    Raises CheckpointError for a tensor that torchtitan's Llama 3 and Qwen3 lack.
    """
    experts, paired = JoinedExperts(shapes, GROUPED), not any(".q_norm." in name for name in shapes)
    theirs = {hf: titan for titan, hf in TORCHTITAN.items()}
    grouped = {location.whole for location in experts.places.values()}
    names: dict[str, str] = {}
    for name in (*experts.shapes, *copies):
        layer, _, suffix = name.rpartition(".")
        block_index = next((word for word in layer.split(".") if word.isdigit()), "N")
        general = layer.replace(f".{block_index}.", ".N.")
        if name in grouped and not paired:
            names[name] = name.removeprefix("model.")
        elif general in theirs and suffix == "weight":
            names[name] = f"{theirs[general].replace('.N.', f'.{block_index}.')}.{suffix}"
        else:
            raise settings.refused(f"{name} has no counterpart in torchtitan's Llama 3 and Qwen3")
    width = head_size(settings)
    biases = {
        names[name].replace("routed_experts.inner_experts.w1_EFD", "expert_bias_E"): experts.shapes[name][0][:1]
        for name in grouped
        if name.endswith(GROUPED[0])
    }

    def renamed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in experts.joined(tensors):
            turned = paired and name.rpartition(".")[0].endswith(PAIRED)
            yield names[name], pairs_of(tensor, width) if turned else tensor
        yield from ((name, torch.zeros(shape)) for name, shape in biases.items())

    every = {names[name]: shape for name, shape in experts.shapes.items()}
    save_tensors(
        folder, every | {name: (shape, torch.float32) for name, shape in biases.items()}, renamed(),
        {names[copy]: names[source] for copy, source in copies.items()},
    )  # fmt: skip
