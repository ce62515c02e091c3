"""The model sections of a config, one a family: fields, and what the rest must know of them. No torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from meshwright.config.section import Layers, Positive, Rule, Section, Share, divisors, listed, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


class Length(NamedTuple):
    """A sequence of tokens: which field holds its length, or which words stand for those that `reads` names."""

    field: str
    number: int
    note: str = ""
    reads: tuple[str, ...] = ()


class Branches(NamedTuple):
    """A block's branches: what tensor parallelism deals out."""

    field: str
    """The field that counts them."""
    number: int
    members: int = 1
    """Equal parts of a branch that ranks with the same one can share out: the queries of a key-value head."""
    shared: str = ""
    """The field that gives all branches of a block one parameter; empty where each parameter is a branch's own."""


@dataclass(frozen=True)
class Routing:
    """Facts of a model's mixture of experts; the defaults are those of a model without one."""

    num_experts: int = 0
    """Experts of a layer, which an axis may deal out."""
    droppable_pairs: int = 0
    """Pairs of each token and an expert, in all layers, that a capacity may drop."""
    stacked_matrices: str = ""
    """The field by which one parameter holds several matrices."""
    bias_rate: float = 0.0
    """How far a step moves the biases by which routers choose experts; 0 where they stay."""
    counts_first: bool = False
    """Whether a step goes forward once more before it trains, to count which experts the global batch takes."""


class Network(Section):
    """Base of all families. Letters as in the glossary: H hidden, V vocabulary. Subclasses add `family`, a Literal."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules on the family's fields, alone and with the data; checked where the family is chosen."""
    chain: ClassVar[str]
    """The model's class, as `module:attribute` (chain.py): it is made of (section, kit, chunk or None)."""
    has_attention: ClassVar[bool] = False
    cuts_context: ClassVar[bool] = False
    """Whether its layers work token by token but for self-attention, and its positions are the tokens' own, so that
    layout.context can cut its sequences."""
    spreads_head: ClassVar[bool] = False
    """Whether its loss is that of a head whose classes stages can share out."""
    separates: ClassVar[bool] = False
    """Whether its attention can keep to the documents of a sequence."""
    has_sinks: ClassVar[bool] = False
    """Whether its attention has sinks."""
    shared_by_samples: ClassVar[str] = ""
    """The field that gives attention's scores addends that all samples share; empty where there are none."""
    reads: ClassVar[str] = "tokens"
    """The form of its batches: what a kind of data gives (data/section.py)."""
    data_kind: ClassVar[str] = "text"
    """The kind of data that a run of it reads where it names none."""
    measured_by: ClassVar[str] = "meshwright.tools.evaluate.perplexity:measure_text"
    """The function that measures its perplexity."""
    generated_by: ClassVar[str] = "meshwright.tools.generate:go_on"
    """The function that generates text of it."""
    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens that it needs besides a text's and the one that ends a text, as published vocabularies spell them."""

    width_fields: ClassVar[tuple[str, ...]] = ("hidden",)
    """The fields that hold the widths of layers: the hidden width, then inner ones."""
    table_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold the rows of tables, before they are padded."""
    has_further_tables: ClassVar[bool] = True
    """Whether there are padded tables besides those: classes of a head, or segments."""
    latent_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold widths of activations between pairs beside the hidden one; one may be null."""

    losses_in_layers: ClassVar[str] = ""
    """The field that gives layers losses of their own, which the head does not see; empty where none has."""
    num_tokens: ClassVar[int] = 0
    """Tokens that it knows; none where it reads no text."""
    longest: ClassVar[int] = 0
    """Tokens that a sample may have."""
    routing: ClassVar[Routing] = Routing()
    """Facts of a mixture of experts, for the planner, the optimizer and the metrics; without one, the defaults."""

    balance_of_folders: ClassVar[str] = ""
    """Why weights that come from a folder train without a balance of their experts, of a family that has some."""

    family: str
    """The form of the network."""
    hidden: Positive = 768
    """H: the width of what goes from layer to layer."""
    dropout: Share = 0.1
    """The share of activations that training sets to zero."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """The addend to a norm's variance."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names: blocks.0.*, *.bias, tokens.weight."""
    vocabulary_multiple: Positive = 64
    """The rows of every table are padded to a multiple of this; padding of classes is masked out of the softmax."""

    def padded(self, rows: int) -> int:
        """`rows` up to the next multiple of vocabulary_multiple."""
        # Padded rows keep products in a GPU's fast kernels and make tables divisible, whatever the vocabulary.
        return math.ceil(rows / self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Layers of the chain that a pipeline cuts."""

    @property
    @abstractmethod
    def branches(self) -> Branches:
        """A block's branches."""

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of layer number `layer` is of experts."""
        return False

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        super().__pydantic_init_subclass__(**more)
        # Each was a property of its own before, and would be overridden to no effect.
        if said := sorted(Routing.__dataclass_fields__.keys() & vars(cls).keys()):
            raise TypeError(f"{cls.__name__} says {', '.join(said)} by itself: its `routing` says it, a Routing")

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """`width_fields` with their values."""
        return tuple((f"model.{name}", getattr(self, name)) for name in self.width_fields)

    @property
    def tables(self) -> tuple[tuple[str, int], ...]:
        """`table_fields` with their values."""
        return tuple((f"model.{name}", getattr(self, name)) for name in self.table_fields)

    @property
    def padded_rows(self) -> int:
        """The rows of every padded table are a multiple of this."""
        # Whoever cuts rows must cut every table: what divides all of them is what counts.
        further = [self.vocabulary_multiple] if self.has_further_tables else []
        return math.gcd(*(self.padded(rows) for _, rows in self.tables), *further)

    def sequences(self, config: Config) -> Iterator[Length]:
        """The sequences that its layers see, token by token; none where layers look at all tokens at once."""
        yield from ()


@rule("model.hidden", "model.heads")
def heads_divide_hidden(config: Config) -> Iterator[Problem]:
    heads, hidden = config.model.branches.number, config.model.hidden
    if hidden % heads:
        yield Problem("model.heads", heads, f"does not divide model.hidden={hidden}", listed(divisors(hidden)))


class Transformer(Network):
    """Layers of attention and feed-forward: L layers, A heads."""

    rules: ClassVar[tuple[Rule, ...]] = (heads_divide_hidden,)
    has_attention: ClassVar[bool] = True

    layers: Layers = 12
    """L: blocks of attention and feed-forward; an encoder-decoder has so many of each."""
    heads: Positive = 12
    """A: attention heads of a layer."""

    @property
    def num_blocks(self) -> int:
        return self.layers

    @property
    def branches(self) -> Branches:
        return Branches("model.heads", self.heads)

    @property
    def inner(self) -> int:
        """N: the width of the feed-forward layer."""
        # The original Transformer's ratio, which GPT-2 and BERT kept.
        return 4 * self.hidden


class TextTransformer(Transformer):
    """A Transformer over tokens."""

    table_fields: ClassVar[tuple[str, ...]] = ("vocabulary",)
    has_further_tables: ClassVar[bool] = False

    positions: Positive = 1024
    """Tokens that a sequence may have."""
    vocabulary: Positive = 50257
    """V: tokens that the network knows; those of data.tokenizer, or more."""

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.vocabulary

    @property
    def longest(self) -> int:  # type: ignore[override]
        return self.positions

    @property
    def padded_vocabulary(self) -> int:
        return self.padded(self.vocabulary)

    def sequences(self, config: Config) -> Iterator[Length]:
        yield Length("data.sequence", config.data.lengths.source)
