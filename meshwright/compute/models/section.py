"""The model sections of a config, one per family: fields, and the facts that other rooms read. No torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from meshwright.compute.models.adapter_section import INSIDE, Adapter
from meshwright.config.section import Layers, Positive, Rule, Section, Share, divisors, listed, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


class Length(NamedTuple):
    """Length of a sequence of tokens. `field`: the config field of the length, or a text that replaces `reads`."""

    field: str
    number: int
    note: str = ""
    reads: tuple[str, ...] = ()


class Branches(NamedTuple):
    """Branches of a block (attention heads), which tensor parallelism distributes over ranks."""

    field: str
    """The config field that counts the branches."""
    number: int
    members: int = 1
    """Equal parts of a branch that several ranks can split: the queries of a key-value head."""
    shared: str = ""
    """The field that gives all branches of a block one shared parameter; empty if there is none."""


@dataclass(frozen=True)
class Routing:
    """Facts of a model's mixture of experts; the defaults describe a model without one."""

    num_experts: int = 0
    """Number of experts per layer, which an axis may shard."""
    droppable_pairs: int = 0
    """Number of (token, expert) pairs per token, over all layers, that a capacity may drop."""
    stacked_matrices: str = ""
    """The field that makes one parameter hold several matrices."""
    bias_rate: float = 0.0
    """Change per step of the biases that routers use to choose experts; 0 for constant biases."""
    counts_first: bool = False
    """Whether a step first runs an extra forward pass, to count the global batch's tokens per expert."""


class Network(Section):
    """Base of all families. Letters as in the glossary: H hidden, V vocabulary. Subclasses add `family`, a Literal."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules on the family's fields, alone and with the data; checked if the family is chosen."""
    chain: ClassVar[str]
    """The model's class, as `module:attribute` (chain.py), called with (section, kit, chunk or None)."""
    has_attention: ClassVar[bool] = False
    cuts_context: ClassVar[bool] = False
    """Whether `layout.context` can split sequences: all layers but self-attention work token by token, and each token
    has a position of its own."""
    branches_in_ends: ClassVar[bool] = False
    """Whether embeddings compute a tensor of each of a rank's branches."""
    spreads_head: ClassVar[bool] = False
    """Whether stages can shard the classes of the head that computes the loss."""
    separates: ClassVar[bool] = False
    """Whether attention can be limited to the documents of a sequence."""
    has_sinks: ClassVar[bool] = False
    """Whether attention has sinks."""
    not_in_graphs: ClassVar[tuple[str, ...]] = ()
    """Names of modules of layers that `compile: blocks` does not compile, apart from attention and experts."""
    uncut_because: ClassVar[str] = ""
    """Why `bits: layout-free` cuts no layers, after "cuts layers of a FAMILY, "; empty if their sums have parts."""
    reads: ClassVar[str] = "tokens"
    """The form of a batch that the model reads; each kind of data gives one (data/section.py)."""
    data_kind: ClassVar[str] = "text"
    """The kind of data of a run that names none."""
    measured_by: ClassVar[str] = "meshwright.tools.evaluate.perplexity:measure_text"
    """The function that measures perplexity."""
    generated_by: ClassVar[str] = "meshwright.tools.generate:go_on"
    """The function that generates text."""
    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Required tokens besides a text's and the end-of-text token, spelled as in published vocabularies."""

    width_fields: ClassVar[tuple[str, ...]] = ("hidden",)
    """The fields that hold the widths of layers: the hidden width, then inner ones."""
    table_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold the rows of tables, before they are padded."""
    has_further_tables: ClassVar[bool] = True
    """Whether there are padded tables besides `table_fields`: classes of a head, or segments."""
    latent_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold widths of activations between pairs, other than the hidden width; a value may be null."""

    losses_in_layers: ClassVar[str] = ""
    """The field that adds losses computed in layers, not by the head; empty if there are none."""
    table_uses: ClassVar[int] = 2
    """Most uses of a table in a forward pass: a tied table's in the embedding and in the head."""
    num_tokens: ClassVar[int] = 0
    """Number of tokens in the vocabulary; 0 if the model reads no text."""
    longest: ClassVar[int] = 0
    """Maximum number of tokens of a sample."""
    routing: ClassVar[Routing] = Routing()
    """Facts of a mixture of experts, for the planner, the optimizer and the metrics; without one, the defaults."""

    balance_of_folders: ClassVar[str] = ""
    """For families with experts: why weights loaded from a folder train without balancing the experts."""

    adapter_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names of the parts of a linear, by the linear's last name, if each part has an adapter."""

    family: str
    """The form of the network."""
    hidden: Positive = 768
    """H: the width of the activations between layers."""
    dropout: Share = 0.1
    """The share of activations that training sets to zero."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """The addend to a norm's variance."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names: blocks.0.*, *.bias, tokens.weight."""
    adapter: Adapter | None = None
    """Low-rank adapters next to linears (LoRA), which are all that is trained; null: no adapters."""
    vocabulary_multiple: Positive = 64
    """The rows of every table are padded to a multiple of this; padding of classes is masked out of the softmax."""

    def padded(self, rows: int) -> int:
        """Round `rows` up to a multiple of `vocabulary_multiple`."""
        # Padded rows allow a GPU's fast kernels and make tables of any vocabulary divisible.
        return math.ceil(rows / self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def freezes(self) -> bool:
        """Whether some parameters are not trained."""
        return bool(self.frozen) or self.adapter is not None

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter is not trained, by the full name."""
        if self.adapter is not None:
            return INSIDE not in name
        return any(fnmatchcase(name, pattern) for pattern in self.frozen)

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of layers of the chain that a pipeline splits."""

    @property
    @abstractmethod
    def branches(self) -> Branches:
        """A block's branches."""

    def has_experts(self, layer: int) -> bool:
        """Return whether layer number `layer` has a mixture of experts as feed-forward."""
        return False

    def layer_form(self, layer: int) -> tuple[object, ...]:
        """Return facts of a layer that change its computation, in addition to its parameters and its products."""
        return ()

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        super().__pydantic_init_subclass__(**more)
        # A class attribute with a name of `Routing` (formerly a separate property) would have no effect.
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
        """The greatest common divisor of the numbers of rows of all padded tables."""
        # A number of shards must divide every table.
        further = [self.vocabulary_multiple] if self.has_further_tables else []
        return math.gcd(*(self.padded(rows) for _, rows in self.tables), *further)

    def sequences(self, config: Config) -> Iterator[Length]:
        """Yield the sequences that layers process token by token; none if layers read all tokens at once."""
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
    """L: layers of attention and feed-forward; an encoder-decoder has L of each."""
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
        # The ratio of the original Transformer, GPT-2 and BERT.
        return 4 * self.hidden


class TextTransformer(Transformer):
    """A Transformer over tokens."""

    table_fields: ClassVar[tuple[str, ...]] = ("vocabulary",)
    has_further_tables: ClassVar[bool] = False

    positions: Positive = 1024
    """The most tokens of a sequence."""
    vocabulary: Positive = 50257
    """V: size of the vocabulary; at least the vocabulary of data.tokenizer."""

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
