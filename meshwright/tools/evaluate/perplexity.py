"""Perplexity of a text over sliding windows. Separate documents and dialogues are measured in alone.py; a family with
another measure names that one in `measured_by`.

Every token of a text is scored once. Windows of `context` tokens begin every `stride` tokens. After the first window
only tokens that no earlier window has scored count; each has at least context - stride tokens to the left. The last
window ends with the text. Begin and end tokens are context and are never scored.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from meshwright.config.registry import load_entry
from meshwright.data.files import ShowProgress, silent
from meshwright.data.messages import learned_dialogues
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.alone import (
    dialogue_perplexity,
    no_stride,
    separate_perplexity,
    validation_loss,
)
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText, config_at, exponential, load_text
from meshwright.tools.evaluate.preferred import preferences_of
from meshwright.tools.evaluate.scored import summed_loss, windows
from meshwright.tools.evaluate.tasks import Question, Task
from meshwright.tools.evaluate.texts import TokenStream, stream_for


@torch.inference_mode()
def text_perplexity(
    loaded: LoadedText,
    stream: TokenStream,
    stride: int | None = None,
    progress: ShowProgress = silent,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Facts:
    """Measure a stream, with losses in nats. Documents are measured separately if the run keeps documents separate.

    Args:
        loaded: The model.
        stream: The text.
        stride: 1 (exact and slow) to context (fast, no overlap); default: half the context.
        progress: Called after every batch.
        batch_tokens: Approximate number of tokens in a forward pass.

    Raises:
        ConfigError: The stride is out of range.
        DataError: There is no token to score.
    """
    context = loaded.context
    if stride is not None and not 1 <= stride <= context:
        raise ConfigError.of("--stride", stride, "does not go with the context", f"1 to {context}")
    stride = stride or max(1, context // 2)
    if loaded.config.data.separate:
        return separate_perplexity(loaded, stream, stride, progress)
    starts, counted, length = windows(len(stream.tokens) - 1, context, stride)
    rows = max(1, batch_tokens // context)
    marks = torch.tensor([loaded.tokenizer.end, loaded.tokenizer.first], device=loaded.device)
    total, num_tokens = 0.0, 0
    for first in range(0, len(starts), rows):
        places = starts[first : first + rows, None] + np.arange(length)  # [B, T]
        scored = torch.from_numpy(places >= counted[first : first + rows, None]).to(loaded.device)
        inputs = torch.from_numpy(stream.tokens[places].astype(np.int64)).to(loaded.device)
        labels = torch.from_numpy(stream.tokens[places + 1].astype(np.int64)).to(loaded.device)
        # Begin and end tokens belong to the format, not to the text.
        mask = scored & ~torch.isin(labels, marks)
        loss, num = summed_loss(loaded, loaded.model.hidden(inputs), labels, mask)
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
        "perplexity_per_word": exponential(total / stream.words),  # Wikitext's measure: tokenizers can be compared
    }


def measure_text(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Return the step folder and the perplexity of a text under a decoder; the rewards of a run's pairs of answers."""
    if question.target is not None:
        family = config_at(question.checkpoint).model.family
        rule = f"has no effect on a {family}, which writes no targets"
        raise ConfigError.of("--target", question.target, rule, "with an encoder-decoder")
    loaded = load_text(question.checkpoint, question.device, question.context)
    if loaded.config.loss is not None and question.data is None:
        no_stride(question.stride)
        return loaded.folder, preferences_of(loaded, progress)
    if (dialogues := learned_dialogues(loaded.config.data, question.data)) is not None:
        no_stride(question.stride)
        facts, corpus = dialogue_perplexity(loaded, dialogues, question.data, progress)
    else:
        stream = stream_for(loaded, question.data, progress)
        facts, corpus = text_perplexity(loaded, stream, question.stride, progress), stream.corpus
    return loaded.folder, facts | ({} if corpus is None else validation_loss(loaded, corpus, progress))


def measure_perplexity(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Return the step folder and the perplexity, by the measure of the checkpoint's family."""
    measured: tuple[Path, Facts] = load_entry(config_at(question.checkpoint).model.measured_by)(question, progress)
    return measured


PERPLEXITY = Task(measure_perplexity, ("target", "stride", "context"))
