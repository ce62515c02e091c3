"""Perplexity: of a text over sliding windows, of an encoder-decoder's targets.

Every token of a text is predicted once, with the context that the stride leaves: windows of `context` tokens begin
`stride` tokens apart; of each but the first, only those tokens count that no window before it has counted, so each has
at least context - stride tokens to its left. The last window ends with the text. Begin and end tokens are context and
never counted: the model is asked for the text alone. In targets they do count, as they end what is to be written; label
smoothing never does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.data.files import ShowProgress, silent
from meshwright.data.pairs_samples import sequence_batch
from meshwright.data.section import Lengths
from meshwright.data.spans import SpanSamples
from meshwright.data.spans_section import span_lengths
from meshwright.errors import ConfigError, DataError
from meshwright.model import IGNORED, Batch, to_device
from meshwright.tools.evaluate.load import (
    BATCH_TOKENS,
    Facts,
    LoadedSequence,
    LoadedText,
    config_at,
    exponential,
    load_sequence,
    load_text,
)
from meshwright.tools.evaluate.tasks import Question, Task
from meshwright.tools.evaluate.texts import TokenStream, asked_pairs, pairs_for, stream_for


def windows(num_targets: int, context: int, stride: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(starts [w], counted [w], length) of windows [w] over the targets 0 ... num_targets - 1.

    Window i holds the targets starts[i] ... starts[i] + length - 1; those from counted[i] on are its own.
    """
    length = min(context, num_targets)
    num = 1 + math.ceil((num_targets - length) / stride)
    starts = np.minimum(np.arange(num, dtype=np.int64) * stride, num_targets - length)
    counted = np.concatenate([np.zeros(1, dtype=np.int64), starts[:-1] + length])
    return starts, counted, length


@torch.inference_mode()
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
    marks = torch.tensor([loaded.tokenizer.end, loaded.tokenizer.first], device=loaded.device)
    total, num_tokens = 0.0, 0
    for first in range(0, len(starts), rows):
        places = starts[first : first + rows, None] + np.arange(length)  # [B, T]
        own = torch.from_numpy(places >= counted[first : first + rows, None]).to(loaded.device)
        inputs = torch.from_numpy(stream.tokens[places].astype(np.int64)).to(loaded.device)
        labels = torch.from_numpy(stream.tokens[places + 1].astype(np.int64)).to(loaded.device)
        mask = own & ~torch.isin(labels, marks)
        loss, num = _summed_loss(loaded, loaded.model.hidden(inputs), labels, mask)
        total, num_tokens = total + loss, num_tokens + num
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


def _summed_loss(loaded: LoadedText, h: Tensor, labels: Tensor, mask: Tensor) -> tuple[float, int]:
    """The summed loss in nats, and the number, of the labels [B, T] in the mask; h [B, T, H]."""
    losses = loaded.head.token_losses(h[mask].unsqueeze(0), labels[mask].unsqueeze(0))  # the head sees these only
    return float(losses.double().sum()), losses.numel()


@torch.inference_mode()
def target_perplexity(
    loaded: LoadedSequence, data: str | None, target: str | None = None, progress: ShowProgress = silent
) -> Facts:
    """Measure held-out samples of what the run learned: targets of pairs, or spans cut out of a text as in validation.

    `left_out` in the result: pairs with a side beyond the context. Raises as `pairs_for` and `stream_for`; DataError
    where all pairs are too long.
    """
    read = _pair_batches if asked_pairs(loaded, data, target) is not None else _span_batches
    name, samples, left_out, batches = read(loaded, data, target, progress)
    total, num_tokens, done = 0.0, 0, 0
    for on_host in batches:
        batch = to_device(on_host, loaded.device)
        labels = batch["labels"]
        loss, num = _summed_loss(loaded, loaded.model.trunk(batch), labels, labels != IGNORED)
        total, num_tokens, done = total + loss, num_tokens + num, done + len(labels)
        progress("perplexity", done / samples)
    return {
        "data": name,
        "samples": samples,
        "left_out": left_out,
        "tokens": num_tokens,
        "context": loaded.context,
        "loss_per_token": total / num_tokens,
        "perplexity_per_token": exponential(total / num_tokens),
    }


_Read = tuple[str, int, int, Iterator[Batch]]
"""The name of the data, its samples, how many more are left out, and all in batches."""


def _pair_batches(loaded: LoadedSequence, data: str | None, target: str | None, progress: ShowProgress) -> _Read:
    given = pairs_for(loaded, data, target, progress)
    encode, end = loaded.tokenizer.encode, [loaded.specials.end]
    sides = [[np.array(encode(text) + end) for text in pair] for pair in given.pairs]
    short = sorted((pair for pair in sides if _longer(pair) <= loaded.context), key=_longer)
    if not short:
        raise DataError(f"{given.name}: has no pair of at most {loaded.context} tokens a side; see --context")
    rows = max(1, BATCH_TOKENS // _longer(short[-1]))

    def batches() -> Iterator[Batch]:
        for first in range(0, len(short), rows):
            part = short[first : first + rows]
            sources, targets = zip(*part, strict=True)
            yield sequence_batch(sources, targets, loaded.specials, Lengths(_longer(part[-1]), _longer(part[-1])))

    return given.name, len(short), len(sides) - len(short), batches()


def _longer(pair: list[np.ndarray]) -> int:
    return max(map(len, pair))


def _span_batches(loaded: LoadedSequence, data: str | None, target: str | None, progress: ShowProgress) -> _Read:
    stream = stream_for(loaded, data, progress)
    tokens = stream.tokens[1:]  # as training has them, without an end token in front
    samples = SpanSamples(tokens, loaded.specials, span_lengths(loaded.context), loaded.config.seed, stream.name)
    rows = max(1, BATCH_TOKENS // loaded.context)
    starts = range(0, len(samples), rows)
    batches = (samples.held_out(first, min(rows, len(samples) - first)) for first in starts)
    return stream.name, len(samples), 0, batches


def _measure(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """The perplexity of a text or, of an encoder-decoder, of targets."""
    if config_at(question.checkpoint).model.reads == "sequences":
        if question.stride is not None:
            raise ConfigError.of("--stride", question.stride, "has no effect on an encoder-decoder", "with a gpt2")
        answering = load_sequence(question.checkpoint, question.device, question.context)
        return answering.folder, target_perplexity(answering, question.data, question.target, progress)
    if question.target is not None:
        raise ConfigError.of("--target", question.target, "has no effect on a gpt2", "with a transformer or t5")
    loaded = load_text(question.checkpoint, question.device, question.context)
    stream = stream_for(loaded, question.data, progress)
    return loaded.folder, text_perplexity(loaded, stream, question.stride, progress)


PERPLEXITY = Task(_measure, ("target", "stride", "context"))
