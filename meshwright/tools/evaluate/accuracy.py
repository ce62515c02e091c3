"""How often a model is right: BERT's masked tokens, the last word of LAMBADA's passages, the classes of images.

LAMBADA (Paperno et al., 2016, arXiv 1606.06031): can the model name the last word of a passage? A word is right if
every one of its sub-tokens is the most likely one given the passage and the sub-tokens before it. As the sub-tokens
before it must be right too, one forward pass over the whole passage decides the same as greedy generation. The word is
encoded with a space in front, apart from its context.

| --data of images | measured |
|---|---|
| none, or the run's own source | the run's held-out split |
| DIR with DIR/train and DIR/validation | DIR/validation |
| any other folder, or digits | all of it |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.data.corpus import documents
from meshwright.data.files import ShowProgress, silent
from meshwright.data.images import open_source
from meshwright.data.masked import MaskedSamples
from meshwright.data.section import STDLIB
from meshwright.data.specials import specials_of
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.model import counts_of, to_device
from meshwright.models.images_section import ImageNetwork
from meshwright.models.section import Bert
from meshwright.tools.evaluate.load import BATCH_TOKENS, Facts, Loaded, LoadedText, exponential
from meshwright.tools.evaluate.texts import TokenStream

BATCH_IMAGES = 64
"""Images a forward pass."""


@torch.inference_mode()
def masked_accuracy(
    loaded: LoadedText, stream: TokenStream, progress: ShowProgress = silent, *, batch_tokens: int = BATCH_TOKENS
) -> Facts:
    """Ask for 15 % of a stream's tokens, once, and whether one text follows the other. The samples are those of the
    training's validation (data/masked.py), drawn from the run's seed: the same each time.

    `batch_tokens`: about so many go through the model at once. Raises CheckpointError where the tokenizer is not the
    model's, DataError and ConfigError where no sample fits.
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
        h = loaded.model.trunk(batch)
        for column, name in enumerate(labels):
            sums[2, column] += loaded.model.loss(h, batch, {other: float(other == name) for other in labels}).cpu()
        sums[0] += torch.tensor(counts_of(batch, labels))
        sums[1] += torch.tensor(loaded.model.num_correct(h, batch))
        progress("masked-lm", min(1.0, (first + rows) / len(samples)))
    facts: Facts = {"data": stream.name, "samples": len(samples), "context": loaded.context}
    for name, (asked, right, loss) in zip(("", "next_sentence_"), sums.t().tolist()):
        facts |= {f"{name}asked": int(asked), f"{name}right": int(right)}
        facts |= {f"{name}accuracy": right / asked, f"{name}loss": loss / asked}
    return facts


@dataclass(frozen=True)
class _Cloze:
    inputs: list[int]
    target: list[int]
    """The last len(target) predictions of the inputs should be these."""


def passages(source: str) -> Iterator[str]:
    """The passages of jsonl or parquet records, of a folder's documents, or of a text file's lines."""
    path = Path(source).expanduser()
    whole = path.is_dir() or path.suffix.lower() in (".jsonl", ".parquet")
    for document in documents(source):
        if whole:
            yield document
        else:
            yield from (line for line in document.splitlines() if line.strip())


@torch.inference_mode()
def cloze_accuracy(loaded: LoadedText, source: str, progress: ShowProgress = silent) -> Facts:
    """Ask for the last word of every passage. A context that is too long is cut from the left.

    Raises DataError on a passage of less than two words, or a last word longer than the model's context.
    """
    questions = [_cloze(loaded, text, f"{source} passage {at}") for at, text in enumerate(passages(source), start=1)]
    if not questions:
        raise DataError(f"{source}: holds no passage")
    questions.sort(key=lambda question: -len(question.inputs))  # a batch's first is its longest; little padding
    correct, total, done = 0, 0.0, 0
    while done < len(questions):
        longest = len(questions[done].inputs)
        batch = questions[done : done + max(1, BATCH_TOKENS // longest)]
        end = loaded.tokenizer.end  # padding to the right: nothing before it can see it
        inputs = torch.tensor([question.inputs + [end] * (longest - len(question.inputs)) for question in batch])
        h = loaded.model.hidden(inputs.to(loaded.device))  # [B, T, H]
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


def _cloze(loaded: LoadedText, text: str, where: str) -> _Cloze:
    words = text.rsplit(maxsplit=1)
    if len(words) < 2:
        raise DataError(f"{where}: is a single word; wanted a context and the word to name behind it")
    context, target = loaded.tokenizer.encode(words[0].strip()), loaded.tokenizer.encode(f" {words[1]}")
    if len(target) > loaded.context:
        raise DataError(f"{where}: its last word has {len(target)} tokens, and the model sees {loaded.context}")
    return _Cloze([*loaded.tokenizer.opening, *context, *target[:-1]][-loaded.context :], target)


@torch.inference_mode()
def image_accuracy(loaded: Loaded, data: str | None, progress: ShowProgress = silent) -> Facts:
    """Ask for the class of every image; classes are numbered by their names' order, as in the training.

    Raises DataError naming an image that cannot be read, ConfigError where the data has more classes than the model.
    """
    model, trained_on = loaded.config.model, loaded.config.data
    assert isinstance(model, ImageNetwork), model
    name = data if data is not None else trained_on.source
    if data is None and name == STDLIB:  # imported, no run of ours
        raise ConfigError.of("--data", "none", f"leaves {loaded.folder} without images", "digits, a folder")
    source = open_source(name)
    source.check_classes(name, model)
    numbers = np.arange(len(source.labels))
    if name == trained_on.source or source.held_out is not None:
        numbers = source.split(trained_on.validation)["validation"]
    correct, total = 0, 0.0
    for start in range(0, len(numbers), BATCH_IMAGES):
        chosen = numbers[start : start + BATCH_IMAGES]
        pixels = np.stack([source.read(number, model.image, model.channels) for number in chosen])
        labels = torch.from_numpy(source.labels[chosen]).unsqueeze(1).to(loaded.device)
        h = loaded.model.trunk({"images": torch.from_numpy(pixels).to(loaded.device)})[:, :1]
        correct += loaded.head.num_correct(h, labels)
        total += float(loaded.head.token_losses(h, labels).double().sum())
        progress("images", min(1.0, (start + BATCH_IMAGES) / len(numbers)))
    return {
        "data": name,
        "classes": len(source.classes),
        "images": len(numbers),
        "correct": correct,
        "accuracy": correct / len(numbers),
        "loss": total / len(numbers),
    }
