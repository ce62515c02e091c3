"""The base of decoders: tokens to a loss in training, to the next token in generation, with cached keys and values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compute.models.chain import Chain
from meshwright.config import Config


@dataclass
class KeyValueCache:
    """Keys and values of all past tokens: one pair per block, [B, K, T, E] each, for K key-value heads. A layer with
    a window keeps only the window's last tokens; a recurrent layer keeps a pair of its own (`replace`)."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens seen so far."""

    def extend(self, layer: int, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens to a layer's cache.

        Args:
            layer: the layer's index; layer 0 counts the tokens.
            key: [B, K, T, E] of the new tokens.
            value: [B, K, T, E] of the new tokens.
            window: the layer's attention window in tokens; None for none.

        Returns:
            All keys and values that the new tokens attend to.
        """
        if layer == 0:
            self.num_tokens += key.shape[2]
        if layer < len(self.layers):
            # Concatenation allocates for each token: cheap next to the matrix products, and needs no maximum size.
            key, value = (torch.cat(both, 2) for both in zip(self.layers.pop(layer), (key, value), strict=True))
        # The next token attends to itself and the window - 1 tokens before. The copy lets older tokens be freed.
        hidden = 0 if window is None else max(0, key.shape[2] - window + 1)
        stored = (key[:, :, hidden:].clone(), value[:, :, hidden:].clone()) if hidden else (key, value)
        self.layers.insert(layer, stored)
        return key, value

    def past_of(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return what a recurrent layer has kept (`replace`); None before the first token."""
        return self.layers[layer] if layer < len(self.layers) else None

    def replace(self, layer: int, stored: tuple[Tensor, Tensor], num_tokens: int) -> None:
        """Keep other tensors of a recurrent layer, each [B, ...].

        Args:
            layer: the layer's index; layer 0 counts the tokens.
            stored: the tensors.
            num_tokens: number of new tokens.
        """
        if layer == 0:
            self.num_tokens += num_tokens
        self.layers[layer : layer + 1] = [stored]

    def select(self, rows: Tensor | Sequence[int]) -> None:
        """Continue with some rows of the batch.

        Args:
            rows: numbers of rows in the new order; a row may be named more than once.
        """
        self.layers = [(key[rows], value[rows]) for key, value in self.layers]


class Decoder(Chain):
    """Base of chains from tokens to a loss. Subclasses make blocks, `norm` and `head`.

    Batch: `tokens` and `labels`, both [B, T]. If attention is kept within documents, also:

    - `positions` [B, T]: each token's position in its document;
    - `documents` [B, T]: the index in the sequence of the document's first token, which attention uses as its limit
      (context/documents.py).
    """

    inside = ("documents",)

    @abstractmethod
    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the normed hidden states [B, T, H] of tokens that follow the cached tokens."""

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        names = ("tokens", "labels", *(("positions", "documents") if config.data.separate else ()))
        return dict.fromkeys(names, (config.data.lengths.source,))
