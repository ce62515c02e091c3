"""Models and their batches: a chain of layers that a pipeline may cut, and named tensors.

A batch is all that a model reads of some samples (sequences, images), which the first dim of its tensors counts.

A label of IGNORED is not valid. Every loss of a model is a sum over the valid elements of one entry, its label;
divided by their number in the global batch it is a mean, also where ranks and microbatches have different numbers.

A model as a chain: embeddings, layers, head and losses. A rank may hold all of it or a chunk.

What passes from layer to layer is a tuple of tensors, of the same shapes after every layer, so that a pipeline may cut
the chain between any two.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100

Batch = dict[str, Tensor]
"""Tensors by name, each [B, ...]."""

SAMPLES = "samples"
"""Stands for a label in `Scales`: the factor of what each sample adds to the loss by itself."""

Scales = Mapping[str, float]
"""Factors of the losses' sums, by the name of their label, and SAMPLES."""

LoadRows = Callable[[int, int], Batch]
"""load(first, count): rows first..first+count of the step's global batch."""


class Samples(Protocol):
    """A split of a data set. Nothing in it has state: a sample's number is its whole cursor."""

    def __len__(self) -> int:
        """Samples an epoch."""

    def samples(self, first: int, count: int) -> Batch:
        """Samples first ... first + count - 1 of the run, shuffled anew in each epoch; the same in every layout."""

    def held_out(self, first: int, count: int) -> Batch:
        """Samples first ... first + count - 1 in the file's order, each time the same; first + count <= len."""


def rows_of(batch: Batch, rows: slice) -> Batch:
    """These rows of every entry of a batch."""
    return {name: x[rows] for name, x in batch.items()}


def counts_of(batch: Batch, labels: Sequence[str]) -> list[int]:
    """The number of valid elements of each label."""
    return [int((batch[name] != IGNORED).sum()) for name in labels]


def scales_of(labels: Sequence[str], counts: Sequence[int], scale: float, samples: int = 1) -> Scales:
    """The scales that turn each loss into `scale` times its mean over `counts` elements, or over the samples."""
    # Counts are of the global batch, so that parts with different numbers of labels add up to one mean. A label that
    # nothing has is a sum of nothing: any divisor will do.
    means = {name: scale / max(1, count) for name, count in zip(labels, counts, strict=True)}
    return means | {SAMPLES: scale / samples}


ON_HOST = frozenset({"documents"})
"""Entries of a batch that stay on the host: they say which kernels run, and a host that read them on a GPU would wait
for all that the GPU has still to do."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device. A GPU copies out of pinned memory, which torch keeps until then: the host goes on."""

    def there(x: Tensor) -> Tensor:
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

    return {name: x if name in ON_HOST else there(x) for name, x in batch.items()}


Hidden = tuple[Tensor, ...]
"""The activations between two layers; one tensor [B, T, H] in a model without a second stream."""


@dataclass(frozen=True)
class Crossing:
    """The end of a piece of a forward or backward pass, at which rows [R, ...] leave for other ranks: given[j] to
    member j of the axis, from which taken[j] come. `stays`: what a later piece of this rank reads."""

    rows: Tensor
    given: Sequence[int]
    taken: Sequence[int]
    stays: Hidden = ()


Run = Callable[..., Any]
"""run(function, *arguments): the function's result; a policy may keep less for the backward pass."""

RunPart = Callable[..., Any]
"""run_part(part, function, *arguments): the function's result. `part`: a layer's number, EMBEDDINGS or HEAD."""


class RunsParts(Protocol):
    """A chain that can be told how to run each of its parts."""

    def run_parts_by(self, run: RunPart) -> None:
        """Choose how parts run.

        Args:
            run: run(part, function, *arguments) returns the function's result.
        """


def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run the function unchanged."""
    return function(*arguments)


Pieces = Generator[Crossing, Hidden, Hidden]
"""A forward pass in pieces: each is sent (rows that came, *what stayed), and the last returns what the pass returns."""


EMBEDDINGS, HEAD = -1, 2**31 - 1
"""The parts of a chain before its layers, which have their numbers, and behind them."""


@dataclass(frozen=True)
class Chunk:
    """A part of a model: these layers, and `first` the embeddings, `last` the head with its losses. It is contiguous,
    unless it is all that a stage of several chunks holds. `head_over`: the axis whose ranks have a part of the head's
    classes each, whatever else they hold."""

    layers: Sequence[int]
    first: bool
    last: bool
    head_over: tuple[str, ...] = ()

    @classmethod
    def whole(cls, num_layers: int) -> Chunk:
        return cls(range(num_layers), True, True)

    @classmethod
    def union(cls, chunks: Sequence[Chunk]) -> Chunk:
        """All chunks of a stage as one."""
        if len(chunks) == 1:
            return chunks[0]
        layers = tuple(layer for chunk in chunks for layer in chunk.layers)
        return cls(layers, any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks))

    @property
    def has_head(self) -> bool:
        """Whether it computes the head, or a part of its classes."""
        return self.last or bool(self.head_over)

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of the chain that are in it, in the order of the forward pass."""
        return *([EMBEDDINGS] if self.first else []), *self.layers, *([HEAD] if self.has_head else [])


def links(num_layers: int) -> tuple[Chunk, Chunk, Chunk]:
    """The embeddings, all layers and the head, each by itself."""
    nothing = range(0)
    return Chunk(nothing, True, False), Chunk(range(num_layers), False, False), Chunk(nothing, False, True)


@dataclass(frozen=True)
class Costs:
    """Costs of a model's parts, in any one unit: embeddings, each layer, head and losses."""

    embedding: float
    layers: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        return self.embedding + sum(self.layers) + self.head


class Model(Protocol):
    """The chain, or a chunk of it, as a stage runs it."""

    chunk: Chunk
    labels: tuple[str, ...]
    """The batch's entries that are labels, one for each loss."""
    inside: tuple[str, ...]
    """The batch's entries that are read inside of branches, and sliced for there: masks of attention."""

    def __call__(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Hidden:
        """The input of the chunk after; the last one returns (the losses' sum, each times its scale,)."""

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Pieces:
        """Run the chunk forward in pieces, each up to where rows leave for experts; the result is a call's."""

    def hidden_states(self, batch: Batch, incoming: Hidden = ()) -> Hidden:
        """The input of the chunk after; the last one returns the normed hidden states [B, T, H]."""

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """The losses of hidden states."""

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        """How many valid elements of each label are the model's likeliest answer, scalars on the device. Without
        gradients."""
