"""The accuracy of a BERT in predicting masked tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.compute.model import counts_of, to_device
from meshwright.data.files import ShowProgress, silent
from meshwright.families.bert.masked import MaskedSamples
from meshwright.families.bert.section import Bert
from meshwright.families.bert.specials import specials_of
from meshwright.ranks.errors import CheckpointError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText, load_text
from meshwright.tools.evaluate.tasks import Question, Task
from meshwright.tools.evaluate.texts import TokenStream, stream_for


@torch.inference_mode()
def masked_accuracy(
    loaded: LoadedText, stream: TokenStream, progress: ShowProgress = silent, *, batch_tokens: int = BATCH_TOKENS
) -> Facts:
    """Measure the accuracy on 15 % of a stream's tokens, each once, and on next-sentence prediction.

    The samples are made as in a training's validation (families/bert/masked.py) from the run's seed, equal on every
    call.

    Args:
        batch_tokens: about the number of tokens in one forward pass.

    Raises:
        CheckpointError: if the tokenizer does not fit the model.
        DataError: if the stream is too short for a sample.
        ConfigError: if the context is too short for a sample.
    """
    model = loaded.config.model
    assert isinstance(model, Bert), model
    specials = specials_of(loaded.tokenizer)
    if specials.vocabulary_size > model.vocabulary:
        size = specials.vocabulary_size
        knows = f"and the model knows {model.vocabulary}"
        raise CheckpointError(f"{loaded.folder}: its tokenizer has {size} tokens with BERT's special ones, {knows}")
    seed, pairs = loaded.config.seed, model.next_sentence
    samples = MaskedSamples(stream.tokens, specials, loaded.context, seed, next_sentence=pairs, name=stream.name)
    rows = max(1, batch_tokens // loaded.context)
    labels = loaded.model.labels
    sums = torch.zeros(3, len(labels), dtype=torch.float64)  # asked, right, losses
    for first in range(0, len(samples), rows):
        batch = to_device(samples.held_out(first, min(rows, len(samples) - first)), loaded.device)
        h = loaded.model.hidden_states(batch)[0]
        for column, name in enumerate(labels):
            # One label has scale 1 and the others 0, so that each loss is computed separately.
            sums[2, column] += loaded.model.loss(h, batch, {label: float(label == name) for label in labels}).cpu()
        sums[0] += torch.tensor(counts_of(batch, labels))
        sums[1] += torch.stack(loaded.model.num_correct(h, batch)).cpu()
        progress("masked-lm", min(1.0, (first + rows) / len(samples)))
    facts: Facts = {"data": stream.name, "samples": len(samples), "context": loaded.context}
    for name, (asked, right, loss) in zip(("", "next_sentence_"), sums.t().tolist()):
        facts |= {f"{name}asked": int(asked), f"{name}right": int(right)}
        facts |= {f"{name}accuracy": right / asked, f"{name}loss": loss / asked}
    return facts


def measure(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Measure accuracy on the question's data, or the held-out texts; return the checkpoint's folder and facts."""
    loaded = load_text(question.checkpoint, question.device, question.context, "masked")
    return loaded.folder, masked_accuracy(loaded, stream_for(loaded, question.data, progress), progress)


MASKED = Task(measure, ("context",))
