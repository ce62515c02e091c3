"""The base of all models: a chain of blocks, under their numbers in the whole model, or a chunk of it."""

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


def run_directly(part: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a part of the chain whose weights need not be gathered."""
    return function(*arguments)


class RunsInContext(nn.Module):
    """An attention that reads the tokens of other ranks by a context, and that a backward pass may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Run = at_once
        self.context: Context = WHOLE_SEQUENCES

    def attend_in(self, context: Context) -> None:
        """Read other ranks' tokens by a context."""
        self.context = context

    def run_by(self, run: Run) -> None:
        """Choose how the scores are computed.

        Args:
            run: run(function, *arguments) returns the function's result.
        """
        self.run = run


class Chain(nn.Module, ABC):
    """Subclasses give blocks and embed; layer, final_states, loss and num_correct where theirs are not those of blocks
    that read one tensor, then `norm` of the first, then a `head` of one label. Block i of the model is `blocks.i` in
    every chunk."""

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
        """The chunk's layers in groups. None reaches from one chunk of a stage into another."""
        self.run_group: Run = at_once
        """Runs the wrapped groups."""
        self.keeps_rows = False
        """Whether a recomputed layer keeps the rows that other ranks have sent it, so that each part of it is computed
        again by itself."""
        self.run_part: RunPart = run_directly

    def attention_cores(self) -> Iterator[RunsInContext]:
        """Yield the cores of all attentions."""
        return (module for module in self.modules() if isinstance(module, RunsInContext))

    def attend_in(self, context: Context) -> None:
        """Attend in a context.

        Args:
            context: cuts batches, and reads other ranks' tokens in each attention.
        """
        self.context = context
        for core in self.attention_cores():
            core.attend_in(context)

    def run_attention_by(self, run: Run) -> None:
        """Choose how each attention core runs.

        Args:
            run: run(function, *arguments) returns the function's result; recomputation keeps the arguments alone.
        """
        for core in self.attention_cores():
            core.run_by(run)

    def run_groups(self, groups: Sequence[Group], run: Run, *, keeps_rows: bool = False) -> None:
        """Choose how layers run.

        Args:
            groups: layers that run together, all of one chunk.
            run: runs the wrapped groups; the others run unchanged.
            keeps_rows: as the attribute has it.
        """
        self.groups, self.run_group, self.keeps_rows = tuple(groups), run, keeps_rows

    def run_of(self, group: Group) -> Run:
        """Return the function that runs a group.

        Args:
            group: one of the chain's.
        """
        return self.run_group if group.wrapped else at_once

    def run_parts_by(self, run: RunPart) -> None:
        """Choose how parts run.

        Args:
            run: run(part, function, *arguments) returns the function's result.
        """
        self.run_part = run

    def wrap_runs(self, again: Callable[[Run], Run], part: Callable[[RunPart], RunPart]) -> None:
        """Wrap how the chain runs.

        Args:
            again: wraps runs of groups and of attention cores, which a backward pass may repeat.
            part: wraps runs of parts.
        """
        self.run_group, self.run_part = again(self.run_group), part(self.run_part)
        for core in self.attention_cores():
            core.run_by(again(core.run))

    def forward(self, batch: Batch, scales: Scales, incoming: Hidden = (), chunk: Chunk | None = None) -> Hidden:
        """Compute the tensors for the next chunk or, at the chain's end, (the sum of the scaled losses,).

        `incoming`: those of the chunk before; the first one reads the batch. `chunk`: which part of what this rank
        holds runs; by default all.
        """
        hidden = self._through(batch, incoming, chunk)
        return self.ended(hidden, batch, scales) if (chunk or self.chunk).last else hidden

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = (), chunk: Chunk | None = None) -> Pieces:
        """`forward` that stops where rows leave for other ranks' experts, and goes on with those that came."""
        raise AssertionError(f"{type(self).__name__} has no experts, and is one piece")

    def ended(self, hidden: Hidden, batch: Batch, scales: Scales) -> Hidden:
        """(The sum of the scaled losses,) of the last layer's output."""
        h = self.run_part(HEAD, self.final_states, hidden)
        # Two parts of the head: an evaluation takes the states and leaves the loss.
        loss = self.run_part(HEAD, self.loss, h, batch, scales)
        return (self.with_layers_losses(loss, hidden, scales),)

    def hidden_states(self, batch: Batch, incoming: Hidden = (), chunk: Chunk | None = None) -> Hidden:
        """`forward` without the loss: the chain's end returns the normed hidden states [B, T, H] that losses read."""
        hidden = self._through(batch, incoming, chunk)
        return (self.run_part(HEAD, self.final_states, hidden),) if (chunk or self.chunk).last else hidden

    def _through(self, batch: Batch, incoming: Hidden, chunk: Chunk | None) -> Hidden:
        """The output of the last layer that runs."""
        part = chunk or self.chunk
        hidden = self.run_part(EMBEDDINGS, self.embed, batch) if part.first else incoming
        return self.run_layers(hidden, batch, part)

    def prepared(self, batch: Batch) -> Batch:
        """A batch of whole sequences with the entries that the model makes of it, before sequences are cut."""
        return batch

    def run_layers(self, hidden: Hidden, batch: Batch, chunk: Chunk) -> Hidden:
        for group in self.groups:
            # A rank's groups are of all its chunks; those of the chunk that runs begin in it, since no group reaches
            # over.
            if group.layers and group.layers[0] in chunk.layers:
                hidden = self.run_of(group)(partial(self._layers, group.layers, batch), hidden)
        return hidden

    def _layers(self, group: Sequence[int], batch: Batch, hidden: Hidden) -> Hidden:
        for layer in group:
            # By part, since zero3 gathers a part's weights here and gives them back behind it.
            hidden = self.run_part(layer, self.layer, self.blocks[str(layer)], hidden, batch)
        return hidden

    @abstractmethod
    def embed(self, batch: Batch) -> Hidden:
        """The first layer's input."""

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        """The hidden tensors behind one block, from those in front of it."""
        return (block(*hidden),)

    def final_states(self, hidden: Hidden) -> Tensor:
        """The normed hidden states [B, T, H]."""
        h: Tensor = self.norm(hidden[0])
        return h

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """The losses of hidden states [B, T, H], summed, each times its scale."""
        (label,) = self.labels
        loss: Tensor = self.head(h, batch[label], scales[label])
        return loss

    def with_layers_losses(self, loss: Tensor, hidden: Hidden, scales: Scales) -> Tensor:
        """The head's loss and those that layers have given on beside the hidden states, in training."""
        return loss

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        """The number of valid elements of each label that are the model's likeliest answer."""
        (label,) = self.labels
        return [cast("TableHead", self.head).num_correct(h, batch[label])]

    @staticmethod
    @abstractmethod
    def products(config: Config) -> Costs:
        """Multiplications of a sample's forward pass: of weights and, where there is attention, in it."""

    @staticmethod
    @abstractmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        """The batch's entries without their first dim."""

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        """Positions of a sample that the model computes."""
        return config.data.lengths.source

    @classmethod
    def flops_per_sample(cls, config: Config) -> int:
        """Floating-point operations of a sample's forward and backward pass: matrix products only, no recomputation.

        6 a weight and token (PaLM, arXiv 2204.02311, appendix B).
        """
        # A product is a multiplication and an addition, forward once and backward twice: 2 x 3.
        return int(6 * cls.products(config).total)


class ChainPart:
    """One chunk of a stage's chain that holds several, as a model by itself."""

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
    """The class of a run's model."""
    return cast(type[Chain], load_entry(config.model.chain))


def make_chain(config: Config, kit: Kit, chunk: Chunk | None = None) -> Chain:
    """A run's model, or a chunk of it, in the words of a kit; its parameters have no values yet."""
    chain: Chain = load_entry(config.model.chain)(config.model, kit, chunk)
    if config.model.frozen:
        freeze(chain, config.model.frozen)
    return chain


def first_trained(config: Config, kit: Kit) -> int:
    """The number of the chain's first part (Chunk.parts) with a trained parameter: no gradient is needed before it."""
    if not config.model.frozen:
        return EMBEDDINGS
    for link in links(config.model.num_blocks):
        trained = [name for name, x in make_chain(config, kit, link).named_parameters() if x.requires_grad]
        if trained:
            return min(link.parts[0] if (layer := split_name(name)[0]) is None else layer for name in trained)
    raise AssertionError("no parameter is trained")


def split_name(name: str) -> tuple[int | None, str]:
    """A parameter's or module's layer, and its name in there; of embeddings and head None, and the name."""
    first, _, rest = name.partition(".")
    layer, _, inner = rest.partition(".")
    return (int(layer), inner) if first == "blocks" else (None, name)


def blocks_of(chunk: Chunk, make_block: Callable[[int], nn.Module]) -> nn.ModuleDict:
    """The chunk's blocks, by their numbers."""
    return nn.ModuleDict({str(layer): make_block(layer) for layer in chunk.layers})


def parameters_of(embedding: dict[str, ShardSpec], layers: dict[str, ShardSpec], head: dict[str, ShardSpec]) -> Costs:
    """Numbers of parameters of the embeddings, each layer and the head."""
    blocks: dict[int, list[ShardSpec]] = {}
    for name, spec in layers.items():
        layer, _ = split_name(name)
        assert layer is not None, f"{name} is no layer's"
        blocks.setdefault(layer, []).append(spec)
    own = tuple(num_parameters(blocks[layer]) for layer in sorted(blocks))
    return Costs(num_parameters(list(embedding.values())), own, num_parameters(list(head.values())))
