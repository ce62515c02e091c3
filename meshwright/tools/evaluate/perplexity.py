"""Perplexity over sliding windows: every token of the text is predicted once, with the context that the stride leaves.

Windows of `context` tokens begin `stride` tokens apart; of each but the first, only those tokens count that no window
before it has counted, so each has at least context - stride tokens to its left. The last window ends with the text.
End tokens are context and never counted: the model is asked for the text alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.data.progress import ShowProgress, silent
from meshwright.errors import ConfigError, DataError
from meshwright.tools.evaluate.model import LoadedModel
from meshwright.tools.evaluate.text import TokenStream

BATCH_TOKENS = 8192
"""Tokens a forward pass: enough to fill the device, few enough for a large model's activations."""


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text. Losses are in nats."""

    data: str
    tokens: int
    words: int
    context: int
    stride: int
    total_loss: float
    """Summed over all tokens."""

    @property
    def loss(self) -> float:
        """The mean a token."""
        return self.total_loss / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean loss a token: depends on the tokenizer."""
        return exponential(self.loss)

    @property
    def word_perplexity(self) -> float:
        """exp of the total loss over the words of the original text, as Wikitext is reported: tokenizers compare."""
        return exponential(self.total_loss / self.words)

    @property
    def facts(self) -> dict[str, str | int | float]:
        return {
            "data": self.data,
            "tokens": self.tokens,
            "words": self.words,
            "context": self.context,
            "stride": self.stride,
            "loss_per_token": self.loss,
            "perplexity_per_token": self.perplexity,
            "perplexity_per_word": self.word_perplexity,
        }


def exponential(x: float) -> float:
    """e to the x; infinite where a float cannot hold it."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def windows(num_targets: int, context: int, stride: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(starts [w], counted [w], length) of windows [w] over the targets 0 ... num_targets - 1.

    Window i holds the targets starts[i] ... starts[i] + length - 1; those from counted[i] on are its own.
    """
    length = min(context, num_targets)
    num = 1 + math.ceil((num_targets - length) / stride)
    starts = np.minimum(np.arange(num, dtype=np.int64) * stride, num_targets - length)
    counted = np.concatenate([np.zeros(1, dtype=np.int64), starts[:-1] + length])
    return starts, counted, length


def text_perplexity(
    loaded: LoadedModel,
    stream: TokenStream,
    stride: int | None = None,
    progress: ShowProgress = silent,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Perplexity:
    """Measure a stream. `stride`: 1 (exact and slow) to context (fast, no overlap); by default half the context.

    `batch_tokens`: about so many go through the model at once.

    Raises ConfigError on a stride outside these, DataError where no token is to be counted.
    """
    context = loaded.context
    if stride is not None and not 1 <= stride <= context:
        raise ConfigError.of("--stride", stride, "does not go with the context", f"1 to {context}")
    stride = stride or max(1, context // 2)
    starts, counted, length = windows(len(stream.tokens) - 1, context, stride)
    rows = max(1, batch_tokens // context)
    total, num_tokens = 0.0, 0
    for first in range(0, len(starts), rows):
        batch = slice(first, first + rows)
        places = starts[batch, None] + np.arange(length)
        loss, num = _batch_loss(loaded, stream.tokens, places, places >= counted[batch, None])
        total += loss
        num_tokens += num
        progress("perplexity", min(1.0, (first + rows) / len(starts)))
    if num_tokens == 0 or stream.words == 0:
        raise DataError(f"{stream.name}: holds no text")
    return Perplexity(stream.name, num_tokens, stream.words, context, stride, total)


@torch.inference_mode()
def _batch_loss(loaded: LoadedModel, tokens: np.ndarray, places: np.ndarray, counted: np.ndarray) -> tuple[float, int]:
    """The summed loss, and the number, of the targets in windows that count. places, counted: [B, T]."""
    inputs = torch.from_numpy(tokens[places].astype(np.int64)).to(loaded.device)
    labels = torch.from_numpy(tokens[places + 1].astype(np.int64)).to(loaded.device)
    mask = torch.from_numpy(counted).to(loaded.device) & (labels != loaded.tokenizer.end)
    h = loaded.model.hidden(inputs)[mask].unsqueeze(0)  # [1, n, H]: the head works for what counts only
    losses = loaded.head.token_losses(h, labels[mask].unsqueeze(0))
    return float(losses.double().sum()), losses.numel()
