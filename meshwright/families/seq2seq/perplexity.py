"""The perplexity of an encoder-decoder's targets, including end tokens, without label smoothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from meshwright.compute.model import IGNORED, Batch, to_device
from meshwright.data.files import ShowProgress, silent
from meshwright.data.section import Lengths
from meshwright.families.seq2seq.load import LoadedSequence, load_sequence
from meshwright.families.seq2seq.pair_texts import asked_pairs, pairs_for
from meshwright.families.seq2seq.pairs_samples import sequence_batch
from meshwright.families.seq2seq.spans import SpanSamples
from meshwright.families.seq2seq.spans_section import span_lengths
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, exponential
from meshwright.tools.evaluate.scored import summed_loss
from meshwright.tools.evaluate.tasks import Question
from meshwright.tools.evaluate.texts import stream_for


@torch.inference_mode()
def target_perplexity(
    loaded: LoadedSequence, data: str | None, target: str | None = None, progress: ShowProgress = silent
) -> Facts:
    """Measure targets of pairs, or spans cut out of a text as in validation, if the run learned spans.

    `left_out` in the result: the number of pairs with a side longer than the context. Raises as `pairs_for` and
    `stream_for`, and DataError if all pairs are too long.
    """
    read = _pair_batches if asked_pairs(loaded, data, target) is not None else _span_batches
    name, samples, left_out, batches = read(loaded, data, target, progress)
    total, num_tokens, done = 0.0, 0, 0
    for on_host in batches:
        batch = to_device(on_host, loaded.device)
        labels = batch["labels"]
        loss, num = summed_loss(loaded, loaded.model.hidden_states(batch)[0], labels, labels != IGNORED)
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
"""The name of the data, the number of samples, the number of pairs left out, and the batches."""


def _pair_batches(loaded: LoadedSequence, data: str | None, target: str | None, progress: ShowProgress) -> _Read:
    given = pairs_for(loaded, data, target, progress)
    encode, end = loaded.tokenizer.encode, [loaded.specials.end]
    sides = [[np.array(encode(text) + end) for text in pair] for pair in given.pairs]
    longer = [max(map(len, pair)) for pair in sides]
    # Pairs of similar length share a pass, for little padding.
    short = [at for at in np.argsort(longer, kind="stable").tolist() if longer[at] <= loaded.context]
    if not short:
        raise DataError(f"{given.name}: has no pair of at most {loaded.context} tokens a side; see --context")
    # From the longest pair, so that the last pass fits too.
    rows = max(1, BATCH_TOKENS // longer[short[-1]])

    def batches() -> Iterator[Batch]:
        for first in range(0, len(short), rows):
            group = short[first : first + rows]
            sources, targets = zip(*(sides[at] for at in group), strict=True)
            longest = longer[group[-1]]
            yield sequence_batch(sources, targets, loaded.specials, Lengths(longest, longest))

    return given.name, len(short), len(sides) - len(short), batches()


def _span_batches(loaded: LoadedSequence, data: str | None, target: str | None, progress: ShowProgress) -> _Read:
    stream = stream_for(loaded, data, progress)
    tokens = stream.tokens[1:]  # as in training, without an end token in front
    samples = SpanSamples(tokens, loaded.specials, span_lengths(loaded.context), loaded.config.seed, stream.name)
    rows = max(1, BATCH_TOKENS // loaded.context)
    starts = range(0, len(samples), rows)
    batches = (samples.held_out(first, min(rows, len(samples) - first)) for first in starts)
    return stream.name, len(samples), 0, batches


def measure(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Measure a checkpoint's perplexity of targets; return the checkpoint's folder and the facts."""
    if question.stride is not None:
        raise ConfigError.of("--stride", question.stride, "has no effect on an encoder-decoder", "with a model of text")
    loaded = load_sequence(question.checkpoint, question.device, question.context)
    return loaded.folder, target_perplexity(loaded, question.data, question.target, progress)
