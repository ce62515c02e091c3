"""Perplexity of texts that a run keeps separate: documents with `data.documents: separate`, and dialogues.

| text       | the row begins with               | scored tokens                               |
|------------|-----------------------------------|---------------------------------------------|
| a document | the begin mark, else the end mark | each token of the document, once            |
| a dialogue | the template's first token        | the tokens that the run learns: the answers |

A row has tokens of one document or dialogue only, as in training. A document longer than the context is read in
windows, as joined text is (perplexity.py). A dialogue longer than the context is left out or cut (`data.overlong`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from meshwright.compute.model import IGNORED, to_device
from meshwright.data.chat import kept_template
from meshwright.data.dialogues import read_dialogues
from meshwright.data.files import ShowProgress
from meshwright.data.messages import flagged, samples_of
from meshwright.data.messages_section import MessagesData
from meshwright.data.packed import DIALOGUE, IDS, SAID, PackedCorpus, is_prepared
from meshwright.data.section import TokenSection
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText, exponential
from meshwright.tools.evaluate.scored import summed_loss, windows
from meshwright.tools.evaluate.texts import TokenStream, held_out


class Row(NamedTuple):
    """A slice of a stream of tokens: inputs start ... stop - 1, labels shifted by one, scored from `first_scored`."""

    start: int
    first_scored: int
    stop: int


def document_rows(stream: TokenStream, end: int, context: int, stride: int) -> Iterator[Row]:
    """Yield the windows over each document. `stride`: tokens between two windows over one document."""
    ends = np.flatnonzero(stream.tokens == end)
    begins_with_end = len(ends) > 0 and ends[0] == 0
    # Without a begin mark a document's first token is predicted from the end mark of the previous document.
    starts = ends if begins_with_end else np.concatenate([[0], ends + 1])
    stops = np.append(ends[1:] if begins_with_end else ends, len(stream.tokens))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if stop - start < 2:  # a mark without text
            continue
        offsets, counted, length = windows(stop - start - 1, context, stride)
        for offset, first_scored in zip(offsets.tolist(), counted.tolist(), strict=True):
            yield Row(start + offset, start + first_scored, start + offset + length)


def dialogue_rows(tokens: np.ndarray, context: int, *, cuts: bool) -> Iterator[Row]:
    """Yield each dialogue that fits the context; with `cuts` also the beginning of a longer one."""
    starts = np.flatnonzero(tokens & DIALOGUE)
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(tokens)], strict=True):
        if stop - start - 1 <= context or cuts:
            yield Row(start, start, min(stop - 1, start + context))


@torch.inference_mode()
def rows_loss(
    loaded: LoadedText, tokens: np.ndarray, rows: list[Row], flags: bool, progress: ShowProgress
) -> tuple[float, int]:
    """Return the summed loss in nats and the number of scored labels. `flags`: score only labels with the flag SAID."""
    marks = () if flags else (loaded.tokenizer.end, loaded.tokenizer.first)
    order = sorted(range(len(rows)), key=lambda at: rows[at].start - rows[at].stop)
    total, num_tokens, done = 0.0, 0, 0
    while done < len(order):
        # Rows are sorted by length, so a batch needs little padding; the first row is the longest.
        longest = rows[order[done]].stop - rows[order[done]].start
        chosen = order[done : done + max(1, BATCH_TOKENS // longest)]
        inputs = np.full((len(chosen), longest), loaded.tokenizer.end, dtype=np.int64)
        labels = np.full((len(chosen), longest), IGNORED, dtype=np.int64)
        for index, at in enumerate(chosen):
            start, first_scored, stop = rows[at]
            run = tokens[start : stop + 1].astype(np.int64)
            ids = run & IDS if flags else run
            scored = (run[1:] & SAID) != 0 if flags else ~np.isin(ids[1:], marks)
            scored[: first_scored - start] = False
            inputs[index, : stop - start] = ids[:-1]
            labels[index, : stop - start] = np.where(scored, ids[1:], IGNORED)
        batch = to_device({"tokens": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}, loaded.device)
        loss, num = summed_loss(
            loaded, loaded.model.hidden(batch["tokens"]), batch["labels"], batch["labels"] != IGNORED
        )
        total, num_tokens, done = total + loss, num_tokens + num, done + len(chosen)
        progress("perplexity", done / len(order))
    return total, num_tokens


def separate_perplexity(loaded: LoadedText, stream: TokenStream, stride: int, progress: ShowProgress) -> Facts:
    """Measure a stream's documents separately. Raises DataError if there is no token to score."""
    marks = (loaded.tokenizer.end, loaded.tokenizer.first)
    rows = list(document_rows(stream, loaded.tokenizer.end, loaded.context, stride))
    total, num_tokens = rows_loss(loaded, stream.tokens, rows, False, progress)
    if num_tokens == 0 or stream.words == 0:
        raise DataError(f"{stream.name}: holds no text")
    return {
        "data": stream.name,
        "documents": int(np.isin(stream.tokens[[row.start for row in rows]], marks).sum()),
        "tokens": num_tokens,
        "words": stream.words,
        "context": loaded.context,
        "stride": stride,
        "loss_per_token": total / num_tokens,
        "perplexity_per_token": exponential(total / num_tokens),
        "perplexity_per_word": exponential(total / stream.words),
    }


def dialogue_perplexity(
    loaded: LoadedText, section: MessagesData, data: str | None, progress: ShowProgress
) -> tuple[Facts, PackedCorpus | None]:
    """Measure the answers of dialogues; return the result, and the prepared folder if there is one.

    Raises DataError if there is no dialogue, or no dialogue fits the context.
    """
    corpus: PackedCorpus | None = None
    if data is not None and not is_prepared(Path(data).expanduser()):
        template = kept_template(loaded.folder, section.asked) or section.chat_template()
        assert template is not None, section
        records = read_dialogues(data, loaded.tokenizer.special_tokens, section.picks)
        samples = (sample for record in records for sample in samples_of(record, section.turns))
        each = [flagged(loaded.tokenizer, *template.dialogue(sample)) for sample in samples]
        if not each:
            raise DataError(f"{data}: holds no dialogue")
        tokens, name = np.concatenate(each), data
    else:
        corpus, name = held_out(loaded, data, section, progress, "messages")
        tokens = corpus.tokens("validation")
    rows = list(dialogue_rows(tokens, loaded.context, cuts=section.overlong == "cut"))
    total, num_tokens = rows_loss(loaded, tokens, rows, True, progress)
    if num_tokens == 0:
        raise DataError(f"{name}: has no dialogue of at most {loaded.context + 1} tokens with an answer; see --context")
    facts: Facts = {
        "data": name,
        "dialogues": len(rows),
        "left_out": int(np.count_nonzero(tokens & DIALOGUE)) - len(rows),
        "tokens": num_tokens,
        "context": loaded.context,
        "loss_per_token": total / num_tokens,
        "perplexity_per_token": exponential(total / num_tokens),
    }
    return facts, corpus


@torch.inference_mode()
def validation_loss(loaded: LoadedText, corpus: PackedCorpus, progress: ShowProgress) -> Facts:
    """Return the loss of a prepared folder's whole validation split, measured as a run does while training.

    The samples are the run's own: windows of data.sequence tokens with end marks among the labels; with separate
    documents without the first tokens. Empty if the split has less than one sample.
    """
    section = loaded.config.data
    assert isinstance(section, TokenSection), section
    try:
        samples, _ = section.samples(loaded.config, corpus, "validation")
    except DataError:
        return {}
    total, num_tokens, rows = 0.0, 0, max(1, BATCH_TOKENS // section.sequence)
    for first in range(0, len(samples), rows):
        batch = to_device(samples.held_out(first, min(rows, len(samples) - first)), loaded.device)
        labels = batch["labels"]
        loss, num = summed_loss(loaded, loaded.model.hidden_states(batch)[0], labels, labels != IGNORED)
        total, num_tokens = total + loss, num_tokens + num
        progress("validation loss", min(1.0, (first + rows) / len(samples)))
    return {"validation_loss": total / num_tokens} if num_tokens else {}


def no_stride(stride: int | None) -> None:
    """Raise ConfigError if a stride was given for dialogues, or pairs of answers."""
    if stride is not None:
        raise ConfigError.of(
            "--stride", stride, "has no effect on dialogues, each of which is read whole", "without it"
        )
