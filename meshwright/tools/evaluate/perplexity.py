"""Perplexity over sliding windows: every token of the text is predicted once, with the context that the stride leaves.

Windows of `context` tokens begin `stride` tokens apart; of each but the first, only those tokens count that no window
before it has counted, so each has at least context - stride tokens to its left. The last window ends with the text.
End tokens are context and never counted: the model is asked for the text alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from meshwright.data.corpus import documents
from meshwright.data.files import ShowProgress, silent
from meshwright.data.packed import PackedCorpus, is_prepared, open_packed
from meshwright.data.packing import corpus_for
from meshwright.data.section import TokenSection
from meshwright.data.tokenizer import Tokenizer, pieces
from meshwright.environment import cache_folder
from meshwright.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText, exponential


@dataclass(frozen=True)
class TokenStream:
    """Documents one behind the other, as in training: an end token first and between them."""

    tokens: np.ndarray
    """Ids [n]. The first is the end token: the context of the text's first token."""
    words: int
    """White-space separated words of the original text."""
    name: str
    """The name of the data, for the reader of the result."""


def stream_for(loaded: LoadedText, data: str | None, progress: ShowProgress = silent) -> TokenStream:
    """The text to measure: `data`, or without it the held-out split of the run that wrote the checkpoint.

    `data`: a prepared folder (its validation split), or whatever `documents` reads: text, jsonl, parquet, a folder of
    these, stdlib. Raises DataError where it cannot be read, is empty, or was tokenized with another tokenizer.
    """
    if data is not None and not is_prepared(Path(data).expanduser()):
        return _encoded(data, loaded.tokenizer, progress)
    if data is not None:
        folder = Path(data).expanduser()
        return _validation_split(open_packed(folder), loaded, f"validation split of {folder}")
    check_trained(loaded)
    asked = loaded.config.data
    assert isinstance(asked, TokenSection), asked
    corpus = corpus_for(asked, cache_folder(), progress)
    name = f"the run's held-out split (data.source={loaded.config.data.source})"
    return _validation_split(corpus, loaded, name)


def check_trained(loaded: LoadedText) -> None:
    """Raises DataError where no run here held anything out."""
    if loaded.steps == 0:
        raise DataError(f"{loaded.folder} was not trained here, so it has no held-out split of its own: give --data")


def check_tokenizer(corpus: PackedCorpus, loaded: LoadedText, name: str) -> None:
    """Raises DataError where a corpus was tokenized with another tokenizer than the model's."""
    if corpus.tokenizer.to_json() != loaded.tokenizer.to_json():
        remedy = "give the text itself as --data"
        raise DataError(f"{name}: was tokenized with another tokenizer than that of {loaded.folder}; {remedy}")


def _validation_split(corpus: PackedCorpus, loaded: LoadedText, name: str) -> TokenStream:
    check_tokenizer(corpus, loaded, name)
    tokens = np.asarray(corpus.tokens("validation"))
    first = np.array([corpus.header.end], dtype=tokens.dtype)
    return TokenStream(np.concatenate([first, tokens]), corpus.header.validation.words, name)


def _encoded(source: str, tokenizer: Tokenizer, progress: ShowProgress) -> TokenStream:
    words = 0

    def parts() -> Iterator[np.ndarray]:
        nonlocal words
        for text in documents(source):
            progress(f"tokenizing: {words} words", None)
            yield np.array([tokenizer.end], dtype=np.int64)
            for part in pieces(text):
                words += len(part.split())  # exact: pieces are cut in front of a space
                yield np.array(tokenizer.encode(part), dtype=np.int64)

    encoded = list(parts())
    if not encoded:
        raise DataError(f"{source}: holds no text")
    return TokenStream(np.concatenate(encoded), words, source)


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
    loaded: LoadedText,
    stream: TokenStream,
    stride: int | None = None,
    progress: ShowProgress = silent,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Facts:
    """Measure a stream, losses in nats.

    `stride`: 1 (exact and slow) to context (fast, no overlap); by default half the context. `batch_tokens`: about so
    many go through the model at once.

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
    return {
        "data": stream.name,
        "tokens": num_tokens,
        "words": stream.words,
        "context": context,
        "stride": stride,
        "loss_per_token": total / num_tokens,
        "perplexity_per_token": exponential(total / num_tokens),  # depends on the tokenizer
        "perplexity_per_word": exponential(total / stream.words),  # as Wikitext is reported: tokenizers compare
    }


@torch.inference_mode()
def _batch_loss(loaded: LoadedText, tokens: np.ndarray, places: np.ndarray, counted: np.ndarray) -> tuple[float, int]:
    """The summed loss, and the number, of the targets in windows that count. places, counted: [B, T]."""
    inputs = torch.from_numpy(tokens[places].astype(np.int64)).to(loaded.device)
    labels = torch.from_numpy(tokens[places + 1].astype(np.int64)).to(loaded.device)
    mask = torch.from_numpy(counted).to(loaded.device) & (labels != loaded.tokenizer.end)
    h = loaded.model.hidden(inputs)[mask].unsqueeze(0)  # [1, n, H]: the head works for what counts only
    losses = loaded.head.token_losses(h, labels[mask].unsqueeze(0))
    return float(losses.double().sum()), losses.numel()
