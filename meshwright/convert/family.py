"""Hugging Face's form of a family of models: settings, tensor names, files beside the weights.

A `TensorPair` is one of our tensors and those of theirs that say the same: their query, key and value are one of ours,
their linears may be stored [out, in] where ours are [in, out], our tables have rows of padding. A family's file has the
table of names; `Family` makes pairs, settings and models of it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple, get_args

import tokenizers
import torch
from tokenizers import processors
from torch import Tensor

from meshwright.config.schema import Model
from meshwright.convert.folder import Settings
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import CheckpointError, DataError
from meshwright.models.section import Transformer
from meshwright.parameters.shard import ShardSpec, shard_specs
from meshwright.ranks.mesh import solo_mesh
from meshwright.registry import load_entry
from meshwright.tensor.serial import SerialKit

TensorShape = tuple[int, ...]
Names = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class TensorPair:
    """One of our tensors, and Hugging Face's tensors that say the same."""

    name: str
    shape: TensorShape
    theirs: Mapping[str, TensorShape]
    """Shapes of Hugging Face's tensors by name, in the order in which the two functions take and return them."""
    to_ours: Callable[..., Tensor] = lambda x: x
    """Hugging Face's tensors to ours, in any shape of the same element order, without the padding."""
    to_theirs: Callable[[Tensor], Sequence[Tensor]] = lambda x: [x]
    """Our tensor without the padding to Hugging Face's, in any shapes of the same element order."""
    padding: int = 0
    """Rows that our tensor has behind Hugging Face's."""
    part: tuple[int, int, int] | None = None
    """(dim, start, stop): ours is this part of Hugging Face's one tensor, whose others are other tensors of ours, the
    parts in their order; None: all of it."""
    single: bool = False
    """Whether it goes out in float32, whatever the dtype of the others."""
    drawn: ShardSpec | None = None
    """The spec of a parameter whose values are drawn, since the folder lacks them; None: they are read."""


def grouped(name: str, shape: TensorShape, theirs: Sequence[str]) -> TensorPair:
    """The pair of our [in, G, out] with G of Hugging Face's linears [out, in]; of a bias, [G, out] with [out] each."""
    groups = len(shape) - 2  # the dim of ours that counts them
    each = (shape[-1], *shape[:groups])
    assert shape[groups] == len(theirs), f"{name} {shape} is not {theirs}"
    return TensorPair(
        name, shape, dict.fromkeys(theirs, each),
        lambda *parts: torch.stack([part.t() for part in parts], groups),
        lambda whole: [part.t() for part in whole.unbind(groups)],
    )  # fmt: skip


def in_blocks(table: Names, count: int, theirs: str, first: int = 0) -> dict[str, str | Sequence[str]]:
    """The names of `count` blocks, ours from number `first` on; `table`: inside a block; `theirs`: a block, N is its
    number."""
    names: dict[str, str | Sequence[str]] = {}
    for number in range(count):
        block = theirs.replace("N", str(number))
        for layer, inside in table.items():
            one = isinstance(inside, str)
            names[f"blocks.{first + number}.{layer}"] = (
                f"{block}.{inside}" if one else [f"{block}.{part}" for part in inside]
            )
    return names


def as_text(content: Mapping[str, object]) -> str:
    """A JSON file's text."""
    return json.dumps(content, indent=2) + "\n"


def with_tokens(text: str, ids: Mapping[str, int], template: processors.PostProcessor) -> str:
    """A tokenizer.json's text with the tokens appended that the model has, and their template, for those who read
    nothing else.

    A text that has them all is returned as it is. Raises DataError where the library would give them other ids.
    """
    library = tokenizers.Tokenizer.from_str(text)
    if all(library.token_to_id(name) is not None for name in ids):
        return text
    library.add_special_tokens(list(ids))
    # add_special_tokens gives the next free ids; a vocabulary with holes, or of another size, gets other ones than the
    # model's table has rows for.
    given, wanted = [library.token_to_id(name) for name in ids], list(ids.values())
    if given != wanted:
        raise DataError(f"the tokenizer gives {', '.join(ids)} the ids {given}, and the model has them as {wanted}")
    # The template last: with tokens that were there before, the file is its owner's, template and all.
    library.post_processor = template
    return str(library.to_str(pretty=True)) + "\n"


class WithTokens(NamedTuple):
    """A tokenizer.json's text with the model's special tokens in it; the settings of config.json that are their ids;
    those of tokenizer_config.json that are their spellings."""

    text: str
    ids: dict[str, int | None]
    tokens: dict[str, str]


class Family(ABC):
    """One family of models in Hugging Face's form."""

    title: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    """The family's names in config.json."""
    told_by: ClassVar[str] = "model_type"
    """A key that tells the family where config.json has no model_type."""
    section: ClassVar[type[Transformer]]
    fields: ClassVar[Mapping[str, str]]
    """Our fields and their keys of config.json; `inner`, the width of the feed-forward layer, may be none of ours."""
    required: ClassVar[tuple[str, ...]]
    """Fields whose key may not be missing."""
    fixed: ClassVar[Mapping[str, object]]
    """Settings that change the mathematics: the value that ours has, which is also what a missing key means."""
    dropouts: ClassVar[tuple[str, ...]] = ()
    """Keys whose values are one number of ours: dropout."""
    dropout: ClassVar[float] = 0.1
    """The dropout that a missing key means."""
    stores_out_in: ClassVar[bool] = True
    """Whether Hugging Face stores the family's linears as [out, in]; ours are [in, out]."""
    tables: ClassVar[Set[str]] = frozenset()
    """Our layers of 2 dims that are no linears and have no padding."""
    passed_over: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    """Stored tensors that are no parameters."""
    reads_text: ClassVar[bool] = True
    architecture: ClassVar[str] = ""
    """The end of the class's name in transformers, where `model_type` alone does not tell the family."""

    @property
    def name(self) -> str:
        """The section's `model.family`."""
        (name,) = get_args(self.section.model_fields["family"].annotation)
        return str(name)

    @abstractmethod
    def names(self, model: Any) -> Names:
        """Hugging Face's layer, or layers, by the name of our layer that says the same."""

    @abstractmethod
    def rows(self, model: Any) -> Mapping[str, int]:
        """The rows that Hugging Face stores, by our layer's name, for layers that have rows of padding here."""

    @abstractmethod
    def further_settings(self, model: Any) -> dict[str, object]:
        """The settings of config.json that are not written key by key."""

    def with_tokenizer(self, model: Any, text: str, tokenizer: Tokenizer) -> WithTokens:
        """The words of a folder on the model's special tokens. `text`: its tokenizer.json, which is `tokenizer`."""
        return WithTokens(text, {}, {})

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        """Fields that are not read key by key. Raises CheckpointError where a setting is of no model that we have."""
        return {}

    def full_name(self, stored: str) -> str:
        """A stored tensor's name as the pairs have it: older folders have others."""
        return stored

    def may_draw(self, name: str) -> bool:
        """Whether a parameter that the folder lacks may have the first values of a run that begins."""
        return False

    def copies(self, model: Any) -> dict[str, str]:
        """Tensors that a folder may hold a second time: name -> the one that it must equal."""
        return {}

    def read(self, settings: Settings, stored: Set[str]) -> Model:
        """The model of a config.json and of the names of the stored tensors. Raises CheckpointError."""
        if missing := [self.fields[field] for field in self.required if self.fields[field] not in settings.values]:
            raise CheckpointError(f"{settings.path} lacks {', '.join(missing)}")
        more = self.further(settings, stored)
        # Mathematics that we do not have is refused by name; a key that changes none is passed over, or harmless keys
        # would shut most published folders out.
        for key, ours in self.fixed.items():
            settings.only(key, ours)
        if self.dropouts:
            more["dropout"] = settings.one_number(self.dropouts, self.dropout)
        return settings.section(self.section, self.fields, family=self.name, **more)

    def settings(self, model: Any) -> dict[str, Any]:
        """The settings of config.json that say what the model is."""
        # `inner` follows from other fields in some families, and is a key of config.json in all.
        values = model.model_dump() | {"inner": model.inner}
        settings = {key: values[field] for field, key in self.fields.items()}
        settings |= dict.fromkeys(self.dropouts, model.dropout) | dict(self.fixed)
        return settings | {"model_type": self.model_types[0]} | self.further_settings(model)

    def further_files(self, model: Any) -> dict[str, str]:
        """The texts of files beside the weights that are no tokenizer's, by file name."""
        return {}

    def specs(self, model: Any) -> dict[str, ShardSpec]:
        """The spec of every parameter of a model, which is built without memory."""
        # The model is asked for its shapes instead of a second list of them, which would drift from it.
        return shard_specs(load_entry(model.chain)(model, SerialKit(solo_mesh(torch.device("meta")))))

    def pairs(self, model: Any) -> list[TensorPair]:
        """The pairs of all parameters of a model."""
        names, rows, specs = self.names(model), self.rows(model), self.specs(model)
        return [self.pair(name, spec.shape, model, names, rows) for name, spec in specs.items()]

    def pair(self, name: str, shape: TensorShape, model: Any, names: Names, rows: Mapping[str, int]) -> TensorPair:
        """The pair of one parameter, by the table of names."""
        layer, _, kind = name.rpartition(".")
        assert layer in names, f"{name} has no counterpart in Hugging Face's {self.title}"
        theirs = names[layer]
        if not isinstance(theirs, str):
            return grouped(name, shape, [f"{one}.{kind}" for one in theirs])
        # Tables and vectors lie the same way round on both sides: only linears are turned.
        if layer in rows or layer in self.tables or len(shape) == 1:
            unpadded = rows.get(layer, shape[0])
            # Padding is ours alone: rows beyond theirs come in as zeros and do not go out.
            return TensorPair(name, shape, {f"{theirs}.{kind}": (unpadded, *shape[1:])}, padding=shape[0] - unpadded)
        if self.stores_out_in:
            return TensorPair(
                name, shape, {f"{theirs}.{kind}": (shape[1], shape[0])}, lambda x: x.t(), lambda x: [x.t()]
            )
        # GPT-2's [in, 3H] is our [in, 3, H] without the middle dim: the same memory.
        flat = (prod(shape),) if kind == "bias" else (shape[0], prod(shape[1:]))
        return TensorPair(name, shape, {f"{theirs}.{kind}": flat})
