"""The base class of models: embeddings, numbered blocks and a head, or a chunk of consecutive ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from meshwright.compute.context.context import WHOLE_SEQUENCES, Context
from meshwright.compute.model import (
    EMBEDDINGS,
    HEAD,
    Batch,
    Chunk,
    Costs,
    Hidden,
    Pieces,
    Run,
    RunPart,
    Scales,
    at_once,
    links,
)
from meshwright.compute.parameters.shard import ShardSpec, freeze, num_parameters
from meshwright.compute.tensor.kit import Kit
from meshwright.config.registry import load_entry
from meshwright.strategies.memory.section import Group

if TYPE_CHECKING:
    from meshwright.compute.tensor.head import TableHead
    from meshwright.config import Config


ADAPTED = "meshwright.compute.models.adapters:adapted_chain"
"""The entry that builds a chain with adapters; runs without adapters do not import it."""
PREFERRING = "meshwright.compute.models.preferences:preferring"
"""The entry that gives a class of chains a loss over pairs; runs on single texts do not import it."""


def run_directly(layer: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a part of the chain without gathering weights."""
    return function(*arguments)


class RunsInContext(nn.Module):
    """An attention with a context, which gets other ranks' tokens; recomputation may run the attention twice."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Run = at_once
        self.context: Context = WHOLE_SEQUENCES

    def attend_in(self, context: Context) -> None:
        """Set the context."""
        self.context = context

    def run_by(self, run: Run) -> None:
        """Choose how the scores are computed.

        Args:
            run: `run(function, *arguments)` returns the function's result.
        """
        self.run = run

    def shaped(self, function: Callable[..., Any], *inputs: Any) -> Tensor:
        """Return a tensor of the output's shape, without values: a `run` for plans of shapes.

        Args:
            function: Is not called.
            inputs: Query, key and value [B, A, T, E] first.
        """
        query, _, value, *_ = inputs
        shape: Tensor = query.new_empty(*query.shape[:-1], value.shape[-1])
        return shape


class Chain(nn.Module, ABC):
    """A model as embeddings, blocks and a head.

    Subclasses define `blocks` and `embed`. The defaults of `layer`, `final_states`, `loss` and `num_correct` fit a
    decoder: each block reads one tensor, `norm` normalises the last output, `head` has one label. Block i of the model
    has the name `blocks.i` in every chunk.
    """

    blocks: nn.ModuleDict
    norm: nn.Module
    head: nn.Module
    labels: tuple[str, ...] = ("labels",)
    inside: tuple[str, ...] = ()

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk
        self.context: Context = WHOLE_SEQUENCES
        """The tokens of the batches' sequences that this rank holds."""
        self.groups: tuple[Group, ...] = (Group(chunk.layers, wrapped=False),)
        """The chunk's layers in groups. All layers of a group belong to one chunk of a stage."""
        self.run_group: Run = at_once
        """Runs groups with `wrapped=True`."""
        self.keeps_rows = False
        """Whether a recomputed layer keeps rows received from other ranks. Each part is then recomputed separately."""
        self.run_part: RunPart = run_directly

    def attention_cores(self) -> Iterator[RunsInContext]:
        """Yield each attention of the chain."""
        return (module for module in self.modules() if isinstance(module, RunsInContext))

    def attend_in(self, context: Context) -> None:
        """Set the context of the chain and of each attention.

        Args:
            context: Cuts batches, and gets other ranks' tokens in each attention.
        """
        self.context = context
        for core in self.attention_cores():
            core.attend_in(context)

    def run_attention_by(self, run: Run) -> None:
        """Choose how each attention core runs.

        Args:
            run: `run(function, *arguments)` returns the function's result; recomputation keeps only the arguments.
        """
        for core in self.attention_cores():
            core.run_by(run)

    def run_groups(self, groups: Sequence[Group], run: Run, *, keeps_rows: bool = False) -> None:
        """Choose how layers run.

        Args:
            groups: Layers that run together; all layers of a group belong to one chunk.
            run: Runs groups with `wrapped=True`; other groups run directly.
            keeps_rows: The value of the attribute.
        """
        self.groups, self.run_group, self.keeps_rows = tuple(groups), run, keeps_rows

    def run_of(self, group: Group) -> Run:
        """Return the function that runs a group of the chain."""
        return self.run_group if group.wrapped else at_once

    def run_parts_by(self, run: RunPart) -> None:
        """Choose how parts run.

        Args:
            run: `run(layer, function, *arguments)` returns the function's result.
        """
        self.run_part = run

    def wrap_runs(self, again: Callable[[Run], Run], wrap_part: Callable[[RunPart], RunPart]) -> None:
        """Wrap how the chain runs.

        Args:
            again: Wraps runs of groups and of attention cores, which a backward pass may repeat.
            wrap_part: Wraps runs of parts.
        """
        self.run_group, self.run_part = again(self.run_group), wrap_part(self.run_part)
        for core in self.attention_cores():
            core.run_by(again(core.run))

    def forward(self, batch: Batch, scales: Scales, incoming: Hidden = (), chunk: Chunk | None = None) -> Hidden:
        """Run a chunk.

        Args:
            batch: The batch's entries.
            scales: The factor of each label's losses.
            incoming: Tensors of the chunk before; the first chunk reads the batch.
            chunk: The chunk to run; None: all that this rank holds.

        Returns:
            Tensors for the next chunk; of the last chunk the sum of the scaled losses, alone in a tuple.
        """
        hidden = self._through(batch, incoming, chunk)
        return self.ended(hidden, batch, scales) if (chunk or self.chunk).last else hidden

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = (), chunk: Chunk | None = None) -> Pieces:
        """Run `forward` as a generator: yield rows for other ranks' experts, and continue with the received rows."""
        raise AssertionError(f"{type(self).__name__} has no experts, and is one piece")

    def ended(self, hidden: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """Return the sum of the scaled losses of the last layer's output, alone in a tuple."""
        h = self.run_part(HEAD, self.final_states, hidden)
        # The head runs in two parts: an evaluation needs the states without the loss.
        loss = self.run_part(HEAD, self.loss, h, batch, scales)
        return (self.with_layers_losses(loss, hidden, scales),)

    def hidden_states(self, batch: Batch, incoming: Hidden = (), chunk: Chunk | None = None) -> Hidden:
        """Run `forward` without the loss: the last chunk returns the normed hidden states [B, T, H]."""
        hidden = self._through(batch, incoming, chunk)
        return (self.run_part(HEAD, self.final_states, hidden),) if (chunk or self.chunk).last else hidden

    def _through(self, batch: Batch, incoming: Hidden, chunk: Chunk | None) -> Hidden:
        """Return the output of the chunk's last layer."""
        current = chunk or self.chunk
        hidden = self.run_part(EMBEDDINGS, self.embed, batch) if current.first else incoming
        return self.run_layers(hidden, batch, current)

    def prepared(self, batch: Batch) -> Batch:
        """Add the model's own entries to a batch of whole sequences, before sequences are cut."""
        return batch

    def run_layers(self, hidden: Hidden, batch: Batch, chunk: Chunk) -> Hidden:
        for group in self.groups:
            # `groups` covers all chunks of this rank; a group belongs to the chunk of its first layer.
            if group.layers and group.layers[0] in chunk.layers:
                hidden = self.run_of(group)(partial(self._layers, group.layers, batch), hidden)
        return hidden

    def _layers(self, group: Sequence[int], batch: Batch, hidden: Hidden) -> Hidden:
        for layer in group:
            # By part: zero3 gathers a part's weights before the part and frees them after it.
            hidden = self.run_part(layer, self.layer, self.blocks[str(layer)], hidden, batch)
        return hidden

    @abstractmethod
    def embed(self, batch: Batch) -> Hidden:
        """Return the first layer's input."""

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        """Run one block: return its outputs."""
        return (block(*hidden),)

    def final_states(self, hidden: Hidden) -> Tensor:
        """Return the normed hidden states [B, T, H]."""
        h: Tensor = self.norm(hidden[0])
        return h

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """Return the sum of losses of hidden states [B, T, H], each times the scale of its label."""
        (label,) = self.labels
        loss: Tensor = self.head(h, batch[label], scales[label])
        return loss

    def with_layers_losses(self, loss: Tensor, hidden: Hidden, scales: Scales) -> Tensor:
        """Add losses of layers, such as the balance of experts, to the head's loss."""
        return loss

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        """Count, for each label, the valid elements equal to the class with the largest logit."""
        (label,) = self.labels
        return [cast("TableHead", self.head).num_correct(h, batch[label])]

    @staticmethod
    @abstractmethod
    def products(config: Config) -> Costs:
        """Count the multiplications of a sample's forward pass: products with weights, and inside attention."""

    @staticmethod
    @abstractmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        """Return the shape of each entry of a batch without the batch dim."""

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        """Count the positions of a sample."""
        return config.data.lengths.source

    @classmethod
    def flops_per_sample(cls, config: Config) -> int:
        """Count the floating-point operations of a sample's forward and backward pass.

        Matrix products only, without recomputation: 6 for each weight and token (PaLM, arXiv 2204.02311, appendix B).
        """
        # A product is a multiplication and an addition, forward once and backward twice: 2 x 3.
        return int(6 * cls.products(config).total)


class ChainPart:
    """One chunk of a stage with several chunks, with the interface of a model."""

    def __init__(self, chain: Chain, chunk: Chunk) -> None:
        self.chain = chain
        self.chunk = chunk
        self.labels, self.inside = chain.labels, chain.inside
        self.loss, self.num_correct = chain.loss, chain.num_correct
        self.hidden_states = partial(chain.hidden_states, chunk=chunk)

    def __call__(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Hidden:
        hidden: Hidden = self.chain(batch, scales, incoming, self.chunk)
        return hidden

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Pieces:
        return self.chain.in_pieces(batch, scales, incoming, self.chunk)


def chain_of(config: Config) -> type[Chain]:
    """Return the class of a run's model."""
    of_texts = cast(type[Chain], load_entry(config.model.chain))
    return of_texts if config.loss is None else cast(type[Chain], load_entry(PREFERRING)(of_texts, config.loss))


def make_chain(config: Config, kit: Kit, chunk: Chunk | None = None) -> Chain:
    """Build a run's model, or a chunk of the model, from a kit's layers. Parameters have no values yet."""
    model, make = config.model, cast(Callable[..., Chain], chain_of(config))
    chain: Chain = make(model, kit, chunk) if model.adapter is None else load_entry(ADAPTED)(make, model, kit, chunk)
    if model.freezes:
        freeze(chain, model.is_frozen)
    return chain


def first_trained(config: Config, kit: Kit) -> int:
    """Return the number of the chain's first part (Chunk.parts) with a trained parameter; earlier parts need no
    gradient."""
    if not config.model.freezes:
        return EMBEDDINGS
    for link in links(config.model.num_blocks):
        trained = [name for name, x in make_chain(config, kit, link).named_parameters() if x.requires_grad]
        if trained:
            return min(link.parts[0] if (layer := split_name(name)[0]) is None else layer for name in trained)
    raise AssertionError("no parameter is trained")


def split_name(name: str) -> tuple[int | None, str]:
    """Split a parameter's or module's name into layer and name inside of the layer.

    Returns:
        The layer's number, or None for embeddings and head; the rest of the name.
    """
    first, _, rest = name.partition(".")
    layer, _, inner = rest.partition(".")
    return (int(layer), inner) if first == "blocks" else (None, name)


def blocks_of(chunk: Chunk, make_block: Callable[[int], nn.Module]) -> nn.ModuleDict:
    """Make the chunk's blocks, by number."""
    return nn.ModuleDict({str(layer): make_block(layer) for layer in chunk.layers})


def parameters_of(embedding: dict[str, ShardSpec], layers: dict[str, ShardSpec], head: dict[str, ShardSpec]) -> Costs:
    """Count the parameters of the embeddings, each layer and the head."""
    blocks: dict[int, list[ShardSpec]] = {}
    for name, spec in layers.items():
        layer, _ = split_name(name)
        assert layer is not None, f"{name} is no layer's"
        blocks.setdefault(layer, []).append(spec)
    counts = tuple(num_parameters(blocks[layer]) for layer in sorted(blocks))
    return Costs(num_parameters(list(embedding.values())), counts, num_parameters(list(head.values())))
