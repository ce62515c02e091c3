"""The tasks of `meshwright eval`: which options each reads, and how it is measured; a result as a table of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.files import ShowProgress
from meshwright.errors import ConfigError
from meshwright.tools.evaluate.accuracy import cloze_accuracy, image_accuracy, masked_accuracy
from meshwright.tools.evaluate.beam import beam_of
from meshwright.tools.evaluate.choices import pair_accuracy, race_accuracy, source_for
from meshwright.tools.evaluate.load import Facts, LoadedText, config_at, load_images, load_sequence, load_text
from meshwright.tools.evaluate.perplexity import target_perplexity, text_perplexity
from meshwright.tools.evaluate.sequence import bleu
from meshwright.tools.evaluate.squad import squad_scores
from meshwright.tools.evaluate.texts import pairs_for, stream_for
from meshwright.tools.evaluate.wikitext import wikitext_stream

Fact = str | int | float | None

TASKS: dict[str, tuple[str, ...]] = {
    "perplexity": ("target", "stride", "context"),
    "wikitext": ("stride", "context"),
    "bleu": ("target", "context", "samples", "beams", "length-penalty"),
    "lambada": ("context",),
    "masked-lm": ("context",),
    "images": (),
    "pairs": ("context",),
    "squad": ("context",),
    "race": ("context",),
}
"""The options that have an effect on a task."""

HARNESS = "lm-eval:"
"""The beginning of the names of lm-evaluation-harness' tasks: `lm-eval:hellaswag,arc_easy`."""
HARNESS_OPTIONS = ("context", "samples", "chat")

FINE_TUNED: Mapping[str, tuple[str, Callable[[LoadedText, str, ShowProgress], Facts]]] = {
    "pairs": ("classified pairs", pair_accuracy),
    "squad": ("answered passages", squad_scores),
    "race": ("answered choices", race_accuracy),
}
"""The form of batches that a fine-tuned BERT of a task reads, and how it is measured."""


NEEDS_DATA = {
    "lambada": "a jsonl file with `text`, or a passage a line",
    "wikitext": "the published file, such as wiki.test.tokens",
}
"""The tasks that no run holds data out for, and the data that they measure on."""


@dataclass(frozen=True)
class Question:
    """The options that were given; None: not given."""

    checkpoint: Path
    device: str
    data: str | None = None
    target: str | None = None
    stride: int | None = None
    context: int | None = None
    samples: int | None = None
    beams: int | None = None
    length_penalty: float | None = None
    chat: bool | None = None

    @property
    def options(self) -> dict[str, int | float | str | None]:
        """The options that not every task reads, as they are spelled."""
        common = ("checkpoint", "device", "data")
        return {name.replace("_", "-"): value for name, value in vars(self).items() if name not in common}


def measure(name: str, question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """The step folder, and the result. Raises ConfigError where there is no such task, or an option has no effect."""
    of_harness = name.startswith(HARNESS)
    if name not in TASKS and not of_harness:
        raise ConfigError.of("--task", name, "is no task", f"{', '.join(TASKS)}, {HARNESS}NAME")
    if name in NEEDS_DATA and question.data is None:
        raise ConfigError.of("--task", name, "needs --data", NEEDS_DATA[name])
    for option, value in question.options.items():
        if value is not None and option not in (HARNESS_OPTIONS if of_harness else TASKS[name]):
            everyones = TASKS | {f"{HARNESS}NAME": HARNESS_OPTIONS}
            tasks = ", ".join(other for other, options in everyones.items() if option in options)
            raise ConfigError.of(f"--{option}", value, f"has no effect on --task {name}", f"--task {tasks}")
    if of_harness:
        from meshwright.tools.harness import CheckpointLM, measure_tasks  # an extra, and seconds

        model = CheckpointLM(question.checkpoint, question.device, question.context)
        names = name.removeprefix(HARNESS).split(",")
        return model.loaded.folder, measure_tasks(
            model, names, question.data, question.samples, chat=question.chat is True
        )
    if name == "perplexity":
        return _perplexity(question, progress)
    if name == "bleu":
        beam = beam_of(question.beams, question.length_penalty)
        answering = load_sequence(question.checkpoint, question.device, question.context)
        pairs = pairs_for(answering, question.data, question.target, progress)
        return answering.folder, bleu(answering, pairs, beam, question.samples, progress)
    if name == "masked-lm":
        masked = load_text(question.checkpoint, question.device, question.context, "masked")
        return masked.folder, masked_accuracy(masked, stream_for(masked, question.data, progress), progress)
    if name in FINE_TUNED:
        reads, score = FINE_TUNED[name]
        tuned = load_text(question.checkpoint, question.device, question.context, reads)
        return tuned.folder, score(tuned, source_for(tuned.config, question.data, name), progress)
    if name == "wikitext":
        reading = load_text(question.checkpoint, question.device, question.context)
        stream = wikitext_stream(reading, str(question.data))
        return reading.folder, text_perplexity(reading, stream, question.stride, progress)
    if name == "lambada":
        loaded = load_text(question.checkpoint, question.device, question.context)
        return loaded.folder, cloze_accuracy(loaded, str(question.data), progress)
    classifier = load_images(question.checkpoint, question.device)
    return classifier.folder, image_accuracy(classifier, question.data, progress)


def _perplexity(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """The perplexity of a text or, of an encoder-decoder, of targets."""
    if config_at(question.checkpoint).model.reads == "sequences":
        if question.stride is not None:
            raise ConfigError.of("--stride", question.stride, "has no effect on an encoder-decoder", "with a gpt2")
        answering = load_sequence(question.checkpoint, question.device, question.context)
        return answering.folder, target_perplexity(answering, question.data, question.target, progress)
    if question.target is not None:
        raise ConfigError.of("--target", question.target, "has no effect on a gpt2", "with a transformer or t5")
    loaded = load_text(question.checkpoint, question.device, question.context)
    return loaded.folder, text_perplexity(
        loaded, stream_for(loaded, question.data, progress), question.stride, progress
    )


def finite(facts: Facts) -> dict[str, Fact]:
    """The result with None for what is not finite: JSON has no word for it."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()
    }


def table_of(facts: Mapping[str, Fact]) -> str:
    """One fact a line."""
    width = max(map(len, facts))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {_shown(value)}" for key, value in facts.items())


def _shown(value: Fact) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
