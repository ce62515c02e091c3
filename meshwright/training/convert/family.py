"""Hugging Face's form of a family of models: settings, tensor names, and files other than weights.

A `TensorPair` maps one of our tensors to Hugging Face's tensors. Query, key and value are three tensors there and one
here; linears may be [out, in] there and are [in, out] here; tables here have rows of padding. A family's module holds
the table of names; `Family` makes pairs, settings and models from the table.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

import tokenizers
import torch
from tokenizers import processors
from torch import Tensor

from meshwright.compute.models.section import Transformer
from meshwright.compute.parameters.shard import ShardSpec, shard_specs
from meshwright.compute.tensor.serial import SerialKit
from meshwright.config.registry import load_entry
from meshwright.config.schema import Model
from meshwright.data.tokenizer import Tokenizer
from meshwright.ranks.errors import CheckpointError, DataError
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.convert.folder import Settings, Source

TensorShape = tuple[int, ...]
Names = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class TensorPair:
    """One of our tensors, and Hugging Face's tensors with the same numbers."""

    name: str
    shape: TensorShape
    theirs: Mapping[str, TensorShape]
    """Shapes of Hugging Face's tensors by name, in the order of `to_ours`'s arguments and `to_theirs`'s results."""
    to_ours: Callable[..., Tensor] = lambda x: x
    """Hugging Face's tensors to ours without the padding, in any shape of the same element order."""
    to_theirs: Callable[[Tensor], Sequence[Tensor]] = lambda x: [x]
    """Our tensor without the padding to Hugging Face's, in any shapes of the same element order."""
    padding: int = 0
    """Rows of our tensor after the last of Hugging Face's."""
    part: tuple[int, int, int] | None = None
    """(dim, start, stop): our tensor is this slice of Hugging Face's one tensor; pairs of one tensor follow each other
    in the order of their slices. None: the whole tensor."""
    single: bool = False
    """Whether an export writes float32, independently of the other tensors' dtype."""
    drawn: ShardSpec | None = None
    """The spec of a parameter that the folder lacks and an import draws at random; None: the import reads it."""


def grouped(name: str, shape: TensorShape, theirs: Sequence[str]) -> TensorPair:
    """Return the pair of our weight [in, G, out] and Hugging Face's G linears [out, in]. For biases: ours [G, out], and
    G of [out]."""
    groups = len(shape) - 2  # the dim of size G
    each = (shape[-1], *shape[:groups])
    assert shape[groups] == len(theirs), f"{name} {shape} is not {theirs}"
    return TensorPair(
        name, shape, dict.fromkeys(theirs, each),
        lambda *parts: torch.stack([linear.t() for linear in parts], groups),
        lambda whole: [linear.t() for linear in whole.unbind(groups)],
    )  # fmt: skip


def in_blocks(
    table: Names, count: int, theirs: str, first: int = 0, ours: str = "blocks"
) -> dict[str, str | Sequence[str]]:
    """Return Hugging Face's names of layers in `count` blocks, by our names.

    Args:
        table: names inside a block.
        count: number of blocks.
        theirs: Hugging Face's name of a block, with N for the number from 0.
        first: our number of the first block.
        ours: our name of the list of blocks.
    """
    names: dict[str, str | Sequence[str]] = {}
    for index in range(count):
        block = theirs.replace("N", str(index))
        for layer, inside in table.items():
            is_single = isinstance(inside, str)
            names[f"{ours}.{first + index}.{layer}"] = (
                f"{block}.{inside}" if is_single else [f"{block}.{linear}" for linear in inside]
            )
    return names


def as_text(content: Mapping[str, object]) -> str:
    """Format a JSON file's text."""
    return json.dumps(content, indent=2) + "\n"


def with_tokens(text: str, ids: Mapping[str, int], template: processors.PostProcessor) -> str:
    """Append the model's special tokens `ids` (by name), and their template, to a tokenizer.json's text.

    A text that has all of these tokens is returned unchanged. Raises DataError if the appended ids would differ.
    """
    library = tokenizers.Tokenizer.from_str(text)
    if all(library.token_to_id(name) is not None for name in ids):
        return text
    library.add_special_tokens(list(ids))
    # add_special_tokens uses the next free ids; in a vocabulary with holes these are not the model's rows.
    appended, wanted = [library.token_to_id(name) for name in ids], list(ids.values())
    if appended != wanted:
        raise DataError(f"the tokenizer gives {', '.join(ids)} the ids {appended}, and the model has them as {wanted}")
    # Only if tokens were appended: a file that had all tokens keeps the owner's template.
    library.post_processor = template
    return str(library.to_str(pretty=True)) + "\n"


class WithTokens(NamedTuple):
    """Special tokens of an exported folder: the text of tokenizer.json, ids for config.json, spellings for
    tokenizer_config.json."""

    text: str
    ids: dict[str, int | None]
    tokens: dict[str, str]


class Family(ABC):
    """One family of models in Hugging Face's form."""

    title: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    """The family's names in config.json."""
    told_by: ClassVar[str] = "model_type"
    """A key of config.json that identifies the family if model_type is missing."""
    section: ClassVar[type[Transformer]]
    fields: ClassVar[Mapping[str, str]]
    """Keys of config.json by our field; `inner`, the feed-forward's width, may be a property and not a field."""
    required: ClassVar[tuple[str, ...]]
    """Fields with a key that config.json must have."""
    fixed: ClassVar[Mapping[str, object]]
    """Keys that change the mathematics, with the one value that our model computes; a missing key means this value."""
    dropouts: ClassVar[tuple[str, ...]] = ()
    """Keys of dropout rates, which must be equal: our model has one rate."""
    dropout: ClassVar[float] = 0.1
    """The dropout rate that a missing key means."""
    outside: ClassVar[Names] = {}
    """Hugging Face's layer, or layers, by the name of our layer, for layers outside of blocks."""
    inside: ClassVar[Names] = {}
    """Hugging Face's layers within a block, by the name of our layer, if all blocks are equal."""
    block: ClassVar[str] = ""
    """Hugging Face's name of a block, with N for the number from 0."""
    rows: ClassVar[Mapping[str, str | int]] = {}
    """Our padded tables: the field with the number of rows that Hugging Face stores, or the number."""
    copied: ClassVar[Mapping[str, str]] = {}
    """Duplicate tensors that a folder may hold, each with the tensor that it must equal: the default of `copies`."""
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns in names of older folders, and the replacements that give the names in `names`."""
    may_lack: ClassVar[tuple[str, ...]] = ()
    """Our layers outside of blocks that a folder may lack, which are initialised at random, as in a new run."""
    stores_out_in: ClassVar[bool] = True
    """Whether Hugging Face stores the family's linears as [out, in]; ours are [in, out]."""
    tables: ClassVar[Set[str]] = frozenset()
    """Our layers with 2-dim weights that are neither linears nor padded."""
    of_storage: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that describe the stored form of tensors; an export has none, since it writes plain ones."""
    passed_over: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    """Names of stored tensors that are not parameters (buffers, heads of another task)."""
    reads_text: ClassVar[bool] = True
    rests_padding: ClassVar[bool] = False
    """Whether transformers' class leaves the padding token's row of the embedding without a gradient."""
    expert_module: ClassVar[str] = ""
    """transformers' module of a layer's experts, with gate_up_proj and down_proj of all experts; empty: none."""
    alternates: ClassVar[bool] = False
    """Whether gates and ups alternate in gate_up_proj's columns."""
    architecture: ClassVar[str] = ""
    """The end of the class's name in transformers, if several families share a `model_type`."""

    @property
    def name(self) -> str:
        """Return the section's `model.family`."""
        (name,) = get_args(self.section.model_fields["family"].annotation)
        return str(name)

    @abstractmethod
    def further_settings(self, model: Any) -> dict[str, object]:
        """Return settings of config.json beyond `fields`, `fixed` and `dropouts`."""

    def with_tokenizer(self, model: Any, text: str, tokenizer: Tokenizer) -> WithTokens:
        """Add the model's special tokens to an export. `text`: the tokenizer.json of `tokenizer`."""
        return WithTokens(text, {}, {})

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        """Return the section's fields beyond `fields`. Raises CheckpointError for settings of a model that we lack."""
        return {}

    def names(self, model: Any) -> Names:
        """Return Hugging Face's layer, or layers, by the name of our layer."""
        return {**self.outside, **in_blocks(self.inside, model.layers, self.block)}

    def expert_linears(self, settings: Settings) -> tuple[str, tuple[str, ...]]:
        """Return folders' module of router and experts, and the names of an expert's gate, up and down; no names: there
        are no experts, or folders have tensors of all experts."""
        return "mlp", ()

    def full_name(self, stored: str) -> str:
        """Return the name, as in `names`, of a stored tensor; older folders have other names."""
        for theirs, ours in self.renamed:
            stored = re.sub(theirs, ours, stored)
        return stored

    def source(self, folder: Path) -> Source:
        """Return the reader of a folder's tensors. Raises CheckpointError as Source."""
        return Source.of_safetensors(folder, self.full_name)

    def copies(self, model: Any) -> dict[str, str]:
        """Return duplicates that a folder may hold: a tensor's name -> the name of the tensor that it must equal."""
        return dict(self.copied)

    def read(self, settings: Settings, stored: Set[str]) -> Model:
        """Read the model of a config.json, given the names of stored tensors. Raises CheckpointError."""
        if missing := [self.fields[field] for field in self.required if self.fields[field] not in settings.values]:
            raise CheckpointError(f"{settings.path} lacks {', '.join(missing)}")
        more = self.further(settings, stored)
        # Only keys that change the mathematics are checked: a check of all unknown keys would refuse most published
        # folders.
        for key, ours in self.fixed.items():
            settings.only(key, ours)
        if self.dropouts:
            more["dropout"] = settings.one_number(self.dropouts, self.dropout)
        return settings.section(self.section, self.fields, family=self.name, **more)

    def settings(self, model: Any) -> dict[str, Any]:
        """Return the settings of config.json that describe the model."""
        # `inner` is a key of config.json in every family, and a property of the section in some.
        values = model.model_dump() | {"inner": model.inner}
        settings = {key: values[field] for field, key in self.fields.items()}
        settings |= dict.fromkeys(self.dropouts, model.dropout) | dict(self.fixed)
        return settings | {"model_type": self.model_types[0]} | self.further_settings(model)

    def further_files(self, model: Any) -> dict[str, str]:
        """Return texts of further files, by file name, without the tokenizer's files."""
        return {}

    def specs(self, model: Any) -> dict[str, ShardSpec]:
        """Return the spec of every parameter of a model, which is built on the meta device."""
        # A list of shapes written here could differ from the model after a change.
        return shard_specs(load_entry(model.chain)(model, SerialKit(solo_mesh(torch.device("meta")))))

    def pairs(self, model: Any) -> list[TensorPair]:
        """Return the pairs of all parameters of a model."""
        names, specs = self.names(model), self.specs(model)
        rows = {layer: n if isinstance(n, int) else int(getattr(model, n)) for layer, n in self.rows.items()}
        return [self.pair(name, spec.shape, model, names, rows) for name, spec in specs.items()]

    def pair(self, name: str, shape: TensorShape, model: Any, names: Names, rows: Mapping[str, int]) -> TensorPair:
        """Return the pair of one parameter.

        Args:
            name: our name.
            shape: our shape, with padding.
            model: the model's section.
            names: result of the method `names`.
            rows: number of rows that Hugging Face stores, by layer.
        """
        layer, _, suffix = name.rpartition(".")
        assert layer in names, f"{name} has no counterpart in Hugging Face's {self.title}"
        theirs = names[layer]
        if not isinstance(theirs, str):
            return grouped(name, shape, [f"{linear}.{suffix}" for linear in theirs])
        # Tables and vectors have equal layouts on both sides; only linears are transposed.
        if layer in rows or layer in self.tables or len(shape) == 1:
            unpadded = rows.get(layer, shape[0])
            # An import fills the padding rows with zeros, and an export leaves them out.
            return TensorPair(name, shape, {f"{theirs}.{suffix}": (unpadded, *shape[1:])}, padding=shape[0] - unpadded)
        if self.stores_out_in:
            return TensorPair(
                name, shape, {f"{theirs}.{suffix}": (shape[1], shape[0])}, lambda x: x.t(), lambda x: [x.t()]
            )
        # GPT-2's [in, 3H] and our [in, 3, H] are the same memory.
        flat = (prod(shape),) if suffix == "bias" else (shape[0], prod(shape[1:]))
        return TensorPair(name, shape, {f"{theirs}.{suffix}": flat})
