"""The tasks of `meshwright eval`: which options each reads, and how it is measured.

A measure's result for a reader: as plain facts for JSON, and as a table of lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright.data.progress import ShowProgress
from meshwright.errors import ConfigError
from meshwright.tools.evaluate.beam import Beam, beam_of
from meshwright.tools.evaluate.bleu import bleu
from meshwright.tools.evaluate.images import image_accuracy, load_image_model
from meshwright.tools.evaluate.lambada import cloze_accuracy
from meshwright.tools.evaluate.masked import load_bert, masked_accuracy
from meshwright.tools.evaluate.model import family_at, load_model
from meshwright.tools.evaluate.pairs import pairs_for, target_perplexity
from meshwright.tools.evaluate.perplexity import text_perplexity
from meshwright.tools.evaluate.sequence import SEQUENCE_FAMILIES, load_sequence
from meshwright.tools.evaluate.text import stream_for

Fact = str | int | float | None


class Result(Protocol):
    """What a measure found."""

    @property
    def facts(self) -> dict[str, str | int | float]:
        """By name, in the order in which they are shown."""


def facts_of(result: Result) -> dict[str, Fact]:
    """The result by name. What is not finite is None: JSON has no word for it."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in result.facts.items()
    }


def table_of(facts: dict[str, Fact]) -> str:
    """One fact a line."""
    width = max(map(len, facts))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {_shown(value)}" for key, value in facts.items())


def _shown(value: Fact) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


@dataclass(frozen=True)
class Question:
    """What was asked for; None: not given."""

    checkpoint: Path
    device: str
    data: str | None = None
    target: str | None = None
    stride: int | None = None
    context: int | None = None
    samples: int | None = None
    beams: int | None = None
    length_penalty: float | None = None

    @property
    def options(self) -> dict[str, int | float | str | None]:
        """Those that not every task reads, as they are spelled."""
        return {
            "target": self.target,
            "stride": self.stride,
            "context": self.context,
            "samples": self.samples,
            "beams": self.beams,
            "length-penalty": self.length_penalty,
        }

    @property
    def beam(self) -> Beam:
        """Raises ConfigError on values that cannot be."""
        return beam_of(self.beams, self.length_penalty)


Measured = tuple[Path, Result]
"""The step folder, and what was found."""


@dataclass(frozen=True)
class Task:
    """One measure. `options`: those of a question's that have an effect; `needs`: what --data must be."""

    measure: Callable[[Question, ShowProgress], Measured]
    options: tuple[str, ...] = ()
    needs: str = ""


def measure(name: str, question: Question, progress: ShowProgress) -> Measured:
    """Raises ConfigError where the task is none of ours or does not go with the options."""
    if name not in TASKS:
        raise ConfigError.of("--task", name, "is no task", ", ".join(TASKS))
    task = TASKS[name]
    if task.needs and question.data is None:
        raise ConfigError.of("--task", name, "needs --data", task.needs)
    for option, value in question.options.items():
        if value is not None and option not in task.options:
            tasks = ", ".join(other for other in TASKS if option in TASKS[other].options)
            raise ConfigError.of(f"--{option}", value, f"has no effect on --task {name}", f"--task {tasks}")
    return task.measure(question, progress)


def _perplexity(question: Question, progress: ShowProgress) -> Measured:
    if family_at(question.checkpoint) in SEQUENCE_FAMILIES:
        return _target_perplexity(question, progress)
    if question.target is not None:
        raise ConfigError.of("--target", question.target, "has no effect on a gpt2", "with a transformer or t5")
    loaded = load_model(question.checkpoint, question.device, question.context)
    stream = stream_for(loaded, question.data, progress)
    return loaded.folder, text_perplexity(loaded, stream, question.stride, progress)


def _target_perplexity(question: Question, progress: ShowProgress) -> Measured:
    if question.stride is not None:
        raise ConfigError.of("--stride", question.stride, "has no effect on an encoder-decoder", "with a gpt2")
    loaded = load_sequence(question.checkpoint, question.device, question.context)
    return loaded.folder, target_perplexity(loaded, question.data, question.target, progress)


def _bleu(question: Question, progress: ShowProgress) -> Measured:
    beam = question.beam
    loaded = load_sequence(question.checkpoint, question.device, question.context)
    pairs = pairs_for(loaded, question.data, question.target, progress)
    return loaded.folder, bleu(loaded, pairs, beam, question.samples, progress)


def _lambada(question: Question, progress: ShowProgress) -> Measured:
    assert question.data is not None, "measure() has looked"
    loaded = load_model(question.checkpoint, question.device, question.context)
    return loaded.folder, cloze_accuracy(loaded, question.data, progress)


def _masked(question: Question, progress: ShowProgress) -> Measured:
    loaded = load_bert(question.checkpoint, question.device, question.context)
    stream = stream_for(loaded, question.data, progress)
    return loaded.folder, masked_accuracy(loaded, stream, progress)


def _images(question: Question, progress: ShowProgress) -> Measured:
    loaded = load_image_model(question.checkpoint, question.device)
    return loaded.folder, image_accuracy(loaded, question.data, progress)


TASKS: dict[str, Task] = {
    "perplexity": Task(_perplexity, ("target", "stride", "context")),
    "bleu": Task(_bleu, ("target", "context", "samples", "beams", "length-penalty")),
    "lambada": Task(_lambada, ("context",), needs="a jsonl file with `text`, or a passage a line"),
    "masked-lm": Task(_masked, ("context",)),
    "images": Task(_images),
}
