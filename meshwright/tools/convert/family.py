"""What a family's file says about Hugging Face's form of it: settings, tensor names, files beside the weights.

A `Pair` is one of our tensors and those of theirs that say the same: their query, key and value are one of ours, their
linears may be stored [out, in] where ours are [in, out], our tables have rows of padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.schema import Model
from meshwright.parameters.shard import shard_specs
from meshwright.ranks.mesh import solo_mesh
from meshwright.tensor.kit import Kit
from meshwright.tensor.serial import SerialKit
from meshwright.tools.convert.settings import Settings

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A tensor under its names."""

    name: str
    shape: Shape
    theirs: Mapping[str, Shape]
    """Theirs by name, in the order in which the two functions take and return them."""
    to_ours: Callable[..., Tensor]
    """Their tensors to ours, in any shape of the same order, without the padding."""
    to_theirs: Callable[[Tensor], Sequence[Tensor]]
    """Ours without the padding to theirs, in any shapes of the same order."""
    padding: int = 0
    """Rows that ours has behind theirs."""


@dataclass(frozen=True)
class Family:
    """One family of models in Hugging Face's form."""

    title: str
    model_types: tuple[str, ...]
    """What config.json calls it."""
    read: Callable[[Settings, Set[str]], Model]
    """The model of a config.json and of the names of the stored tensors."""
    pairs: Callable[[Any], list[Pair]]
    """Every parameter of a model."""
    files: Callable[[Any, str | None, str], dict[str, str]]
    """The texts beside the weights, by file name; of a model, its tokenizer.json where there is one, and the dtype."""
    full_name: Callable[[str], str]
    """A stored tensor's name as the pairs have it: older folders have others."""
    copies: Callable[[Any], dict[str, str]]
    """Tensors that a folder may hold a second time: name -> the one that it must equal."""
    passed_over: re.Pattern[str]
    """Stored tensors that are no parameters."""
    reads_text: bool = True


def shapes_of(model: Callable[[Any, Kit], nn.Module], section: Model) -> dict[str, Shape]:
    """Our parameters' global shapes."""
    specs = shard_specs(model(section, SerialKit(solo_mesh(torch.device("meta")))))
    return {name: spec.shape for name, spec in specs.items()}


def alike(name: str, shape: Shape, theirs: str, their_shape: Shape | None = None) -> Pair:
    """The same elements in the same order. Ours may have more rows, the padding; theirs is then [rows, ...]."""
    their_shape = their_shape or shape
    padding = shape[0] - their_shape[0] if len(shape) == len(their_shape) else 0
    return Pair(name, shape, {theirs: their_shape}, lambda x: x, lambda x: [x], padding)


def transposed(name: str, shape: Shape, theirs: str) -> Pair:
    """Ours [in, out], theirs [out, in]."""
    return Pair(name, shape, {theirs: (shape[1], shape[0])}, lambda x: x.t(), lambda x: [x.t()])


def grouped(name: str, shape: Shape, theirs: Sequence[str]) -> Pair:
    """Ours [in, G, out] and theirs G linears [out, in]; or a bias, ours [G, out] and theirs [out] each."""
    groups = len(shape) - 2  # the dim of ours that counts them
    each = (shape[-1], *shape[:groups])

    def to_ours(*parts: Tensor) -> Tensor:
        return torch.stack([part.t() for part in parts], groups)

    def to_theirs(whole: Tensor) -> list[Tensor]:
        return [part.t() for part in whole.unbind(groups)]

    assert shape[groups] == len(theirs), f"{name} {shape} is not {theirs}"
    return Pair(name, shape, dict.fromkeys(theirs, each), to_ours, to_theirs)
