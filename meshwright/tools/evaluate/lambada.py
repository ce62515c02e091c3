"""Accuracy on LAMBADA (Paperno et al., 2016, arXiv 1606.06031): the share of passages with a correct last word.

A word is correct if each sub-token is the most likely one given the passage and the previous sub-tokens. Since the
previous sub-tokens must be correct too, one forward pass over the whole passage decides as greedy generation would. The
word is encoded separately from the context, with a space in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from meshwright.data.corpus import documents
from meshwright.data.files import ShowProgress, silent
from meshwright.data.forms_section import is_text
from meshwright.ranks.errors import DataError
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, LoadedText, exponential, load_text
from meshwright.tools.evaluate.tasks import Question, Task


@dataclass(frozen=True)
class _Cloze:
    inputs: list[int]
    target: list[int]
    """The correct tokens for the last len(target) predictions."""


def passages(source: str) -> Iterator[str]:
    """Yield the passages: records, a folder's documents, or a text file's lines."""
    path = Path(source).expanduser()
    whole = path.is_dir() or not is_text(path)
    for document in documents(source):
        if whole:
            yield str(document)
        else:
            yield from (line for line in str(document).splitlines() if line.strip())


@torch.inference_mode()
def cloze_accuracy(loaded: LoadedText, source: str, progress: ShowProgress = silent) -> Facts:
    """Measure the prediction of every passage's last word. A passage longer than the context is cut from the left.

    Raises DataError for a passage of less than two words, or a last word longer than the model's context.
    """
    questions, tokenizer = [], loaded.tokenizer
    for at, text in enumerate(passages(source), start=1):
        words = text.rsplit(maxsplit=1)
        if len(words) < 2:
            rule = "is a single word; wanted a context and the word to name behind it"
            raise DataError(f"{source} passage {at}: {rule}")
        # Context and word are encoded separately: a token across both would give part of the word away.
        context, word = tokenizer.encode(words[0].strip()), tokenizer.encode(f" {words[1]}")
        if len(word) > loaded.context:
            rule = f"its last word has {len(word)} tokens, and the model sees {loaded.context}"
            raise DataError(f"{source} passage {at}: {rule}")
        inputs = [*tokenizer.opening, *context, *word[:-1]]
        questions.append(_Cloze(inputs[-loaded.context :], word))
    if not questions:
        raise DataError(f"{source}: holds no passage")
    questions.sort(key=lambda question: -len(question.inputs))  # a batch begins with the longest: little padding
    correct, total, done = 0, 0.0, 0
    while done < len(questions):
        longest = len(questions[done].inputs)
        batch = questions[done : done + max(1, BATCH_TOKENS // longest)]
        end = loaded.tokenizer.end  # padding on the right: no earlier token attends to it
        padded = torch.tensor([question.inputs + [end] * (longest - len(question.inputs)) for question in batch])
        h = loaded.model.hidden(padded.to(loaded.device))  # [B, T, H]
        for row, question in zip(h, batch, strict=True):
            stop = len(question.inputs)
            logits = loaded.head.logits(row[stop - len(question.target) : stop])  # [t, V]
            target = torch.tensor(question.target, device=loaded.device)
            correct += int((logits.argmax(-1) == target).all())
            total += float(F.cross_entropy(logits.double(), target, reduction="sum"))
        done += len(batch)
        progress("cloze", done / len(questions))
    return {
        "data": source,
        "passages": len(questions),
        "correct": correct,
        "context": loaded.context,
        "accuracy": correct / len(questions),
        "perplexity_per_word": exponential(total / len(questions)),  # all sub-tokens of a last word together
    }


def measure_lambada(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Return the step folder and the result of `cloze_accuracy`. Raises as `load_text` and `cloze_accuracy`."""
    loaded = load_text(question.checkpoint, question.device, question.context)
    return loaded.folder, cloze_accuracy(loaded, str(question.data), progress)


LAMBADA = Task(measure_lambada, ("context",), needs_data="a jsonl file with `text`, or a passage a line")
