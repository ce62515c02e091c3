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
    """Keys and values of the tokens seen so far, one pair a block, [B, K, T, E] each; K: heads that have some. Of a
    layer with a window, those of the window's last tokens."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens seen so far."""

    def extend(self, layer: int, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append to a layer's pair and return all that the new tokens see. `window`: the layer's."""
        if layer == 0:
            self.num_tokens += key.shape[2]
        if layer < len(self.layers):
            # A new tensor each token: cheap beside a pass's products, and no size need be known ahead.
            key, value = (torch.cat(both, 2) for both in zip(self.layers.pop(layer), (key, value), strict=True))
        # The next token sees itself and window - 1 tokens before it. A copy frees the others' memory.
        hidden = 0 if window is None else max(0, key.shape[2] - window + 1)
        kept = (key[:, :, hidden:].clone(), value[:, :, hidden:].clone()) if hidden else (key, value)
        self.layers.insert(layer, kept)
        return key, value

    def select(self, rows: Tensor | Sequence[int]) -> None:
        """Continue with some rows of the batch.

        Args:
            rows: numbers of rows in the new order; a row may be named more than once.
        """
        self.layers = [(key[rows], value[rows]) for key, value in self.layers]


class Decoder(Chain):
    """Tokens to a loss. Subclasses make blocks, `norm` and `head`.

    Batch: `tokens` and `labels`, both [B, T]. Where documents are kept apart also `positions` [B, T], each token's
    place in its document, and `documents` [B, T], the place in the sequence where that begins, by which attention keeps
    to it (context/documents.py).
    """

    inside = ("documents",)

    @abstractmethod
    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The normed hidden states [B, T, H] of tokens that follow those in the cache."""

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        names = ("tokens", "labels", *(("positions", "documents") if config.data.separate else ()))
        return dict.fromkeys(names, (config.data.lengths.source,))
