"""Models as chains of layers, which a pipeline cuts, and batches as named tensors.

A batch has a model's inputs of some samples (sequences, images); the first dim of each tensor counts samples.

A label of IGNORED is not valid. Every loss of a model is a sum over the valid elements of one entry, its label;
divided by their number in the global batch it is a mean, also where ranks and microbatches have different numbers.

A model as a chain: embeddings, layers, head and losses. A rank may hold all of it or a chunk.

Layers pass a tuple of tensors, of the same shapes after every layer, so that a pipeline may cut the chain between any
two layers.
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
"""The key in `Scales` for losses of samples instead of a label, such as the balance of experts."""

Scales = Mapping[str, float]
"""Factors of the sums of losses, by name of the label, and SAMPLES."""

LoadRows = Callable[[int, int], Batch]
"""`load(first, count)` returns rows first..first+count of the step's global batch."""


class Samples(Protocol):
    """A split of a data set, without state: a sample's number is the whole cursor."""

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""

    def samples(self, first: int, count: int) -> Batch:
        """Return samples first ... first + count - 1 of the run, shuffled in each epoch, equal in every layout."""

    def held_out(self, first: int, count: int) -> Batch:
        """Return samples first ... first + count - 1 in the file's order; first + count <= len."""


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Cut every entry of a batch to these rows."""
    return {name: x[rows] for name, x in batch.items()}


def counts_of(batch: Batch, labels: Sequence[str]) -> list[int]:
    """Count the valid elements of each label."""
    return [int((batch[name] != IGNORED).sum()) for name in labels]


def scales_of(labels: Sequence[str], counts: Sequence[int], scale: float, samples: int = 1) -> Scales:
    """Return the scales that make a sum of losses `scale` times the mean over `counts` elements, or over samples."""
    # Counts are of the global batch, so parts with different numbers of labels add up to one mean. The sum of a label
    # without elements is 0 for any divisor.
    means = {name: scale / max(1, count) for name, count in zip(labels, counts, strict=True)}
    return means | {SAMPLES: scale / samples}


ON_HOST = frozenset({"documents"})
"""Entries of a batch that stay in host memory: the host chooses kernels by them, and a read from a GPU would wait for
all issued kernels."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to the device; to a GPU from pinned memory, without a wait of the host."""

    def there(x: Tensor) -> Tensor:
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

    return {name: x if name in ON_HOST else there(x) for name, x in batch.items()}


Hidden = tuple[Tensor, ...]
"""The activations between two layers; one tensor [B, T, H] in a model without a second stream."""


@dataclass(frozen=True)
class Crossing:
    """The end of a piece of a forward or backward pass, where ranks exchange rows.

    Attributes:
        rows: Rows [R, ...] for other ranks.
        given: Rows to send to each member of the axis.
        taken: Rows to receive from each member.
        stays: Tensors for a later piece of this rank.
    """

    rows: Tensor
    given: Sequence[int]
    taken: Sequence[int]
    stays: Hidden = ()


Run = Callable[..., Any]
"""`run(function, *arguments)` returns the function's result; a policy may keep less for the backward pass."""

RunPart = Callable[..., Any]
"""`run_part(layer, function, *arguments)` returns the result; layer: a layer's index, EMBEDDINGS or HEAD."""


class RunsParts(Protocol):
    """A chain with a choice of the function that runs parts."""

    def run_parts_by(self, run: RunPart) -> None:
        """Choose how parts run.

        Args:
            run: `run(layer, function, *arguments)` returns the function's result.
        """


def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run the function unchanged."""
    return function(*arguments)


Pieces = Generator[Crossing, Hidden, Hidden]
"""A forward pass in pieces: a piece gets (received rows, *stays), the last returns the result of the pass."""


EMBEDDINGS, HEAD = -1, 2**31 - 1
"""The parts of a chain before and after the layers; a layer is the part of its number."""


@dataclass(frozen=True)
class Chunk:
    """A part of a model: consecutive layers, or all layers of a stage with several chunks.

    Attributes:
        layers: Numbers of the layers.
        first: Whether the chunk has the embeddings.
        last: Whether the chunk has the head and losses.
        head_over: The axis that shards the head's classes over ranks; empty: the last chunk has the head.
    """

    layers: Sequence[int]
    first: bool
    last: bool
    head_over: tuple[str, ...] = ()

    @classmethod
    def whole(cls, num_layers: int) -> Chunk:
        return cls(range(num_layers), True, True)

    @classmethod
    def union(cls, chunks: Sequence[Chunk]) -> Chunk:
        """Join all chunks of a stage."""
        if len(chunks) == 1:
            return chunks[0]
        layers = tuple(layer for chunk in chunks for layer in chunk.layers)
        return cls(layers, any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks))

    @property
    def has_head(self) -> bool:
        """Whether the chunk computes the head, or a part of the head's classes."""
        return self.last or bool(self.head_over)

    @property
    def parts(self) -> tuple[int, ...]:
        """The chunk's parts of the chain, in the order of the forward pass."""
        return *([EMBEDDINGS] if self.first else []), *self.layers, *([HEAD] if self.has_head else [])


def links(num_layers: int) -> tuple[Chunk, Chunk, Chunk]:
    """Return three chunks: the embeddings, all layers, the head."""
    nothing = range(0)
    return Chunk(nothing, True, False), Chunk(range(num_layers), False, False), Chunk(nothing, False, True)


@dataclass(frozen=True)
class Costs:
    """Costs of a model's parts in one unit: embeddings, each layer, head and losses."""

    embedding: float
    layers: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        return self.embedding + sum(self.layers) + self.head


class Model(Protocol):
    """A chain, or a chunk of a chain, for a stage."""

    chunk: Chunk
    labels: tuple[str, ...]
    """Names of the batch's labels, one for each loss."""
    inside: tuple[str, ...]
    """Names of the batch's entries that attention reads, such as masks."""

    def __call__(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Hidden:
        """Return the input of the next chunk; of the last chunk the sum of scaled losses, alone in a tuple."""

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = ()) -> Pieces:
        """Run the chunk forward in pieces, each up to an exchange of experts' rows; return the result of a call."""

    def hidden_states(self, batch: Batch, incoming: Hidden = ()) -> Hidden:
        """Return the input of the next chunk; of the last chunk the normed hidden states [B, T, H]."""

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """Return the sum of scaled losses of hidden states [B, T, H]."""

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        """Count, for each label, the valid elements equal to the class with the largest logit: scalars on the device,
        without gradients."""
