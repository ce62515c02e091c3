"""The tasks of `meshwright eval`: which options each reads, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.progress import Progress
from meshwright.errors import ConfigError
from meshwright.evaluate.images import image_accuracy, load_image_model
from meshwright.evaluate.lambada import cloze_accuracy
from meshwright.evaluate.masked import load_bert, masked_accuracy
from meshwright.evaluate.model import load_model
from meshwright.evaluate.perplexity import text_perplexity
from meshwright.evaluate.report import Result
from meshwright.evaluate.text import stream_for


@dataclass(frozen=True)
class Question:
    """What was asked for; None: not given."""

    checkpoint: Path
    device: str
    data: str | None = None
    stride: int | None = None
    context: int | None = None


Measured = tuple[Path, Result]
"""The step folder, and what was found."""


@dataclass(frozen=True)
class Task:
    """One measure. `options`: those of stride and context that have an effect; `needs`: what --data must be."""

    measure: Callable[[Question, Progress], Measured]
    options: tuple[str, ...] = ()
    needs: str = ""


def measure(name: str, question: Question, progress: Progress) -> Measured:
    """Raises ConfigError where the task is none of ours or does not go with the options."""
    if name not in TASKS:
        raise ConfigError.of("--task", name, "is no task", ", ".join(TASKS))
    task = TASKS[name]
    if task.needs and question.data is None:
        raise ConfigError.of("--task", name, "needs --data", task.needs)
    for option, value in (("stride", question.stride), ("context", question.context)):
        if value is not None and option not in task.options:
            tasks = ", ".join(other for other in TASKS if option in TASKS[other].options)
            raise ConfigError.of(f"--{option}", value, f"has no effect on --task {name}", f"--task {tasks}")
    return task.measure(question, progress)


def _perplexity(question: Question, progress: Progress) -> Measured:
    loaded = load_model(question.checkpoint, question.device, question.context)
    stream = stream_for(loaded, question.data, progress)
    return loaded.folder, text_perplexity(loaded, stream, question.stride, progress)


def _lambada(question: Question, progress: Progress) -> Measured:
    assert question.data is not None, "measure() has looked"
    loaded = load_model(question.checkpoint, question.device, question.context)
    return loaded.folder, cloze_accuracy(loaded, question.data, progress)


def _masked(question: Question, progress: Progress) -> Measured:
    loaded = load_bert(question.checkpoint, question.device, question.context)
    stream = stream_for(loaded, question.data, progress)
    return loaded.folder, masked_accuracy(loaded, stream, progress)


def _images(question: Question, progress: Progress) -> Measured:
    loaded = load_image_model(question.checkpoint, question.device)
    return loaded.folder, image_accuracy(loaded, question.data, progress)


TASKS: dict[str, Task] = {
    "perplexity": Task(_perplexity, ("stride", "context")),
    "lambada": Task(_lambada, ("context",), needs="a jsonl file with `text`, or a passage a line"),
    "masked-lm": Task(_masked, ("context",)),
    "images": Task(_images),
}
