"""The tasks of `meshwright eval`: which options each reads, and how it is measured; a result as a table of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.files import ShowProgress
from meshwright.errors import ConfigError
from meshwright.tools.evaluate.beam import beam_of
from meshwright.tools.evaluate.images import image_accuracy
from meshwright.tools.evaluate.lambada import cloze_accuracy
from meshwright.tools.evaluate.load import Facts, config_at, load_images, load_sequence, load_text
from meshwright.tools.evaluate.masked import masked_accuracy
from meshwright.tools.evaluate.pairs import bleu, pairs_for, target_perplexity
from meshwright.tools.evaluate.perplexity import stream_for, text_perplexity

Fact = str | int | float | None


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


_Measured = tuple[Path, Facts]
"""The step folder, and the result."""


def _perplexity(question: Question, progress: ShowProgress) -> _Measured:
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


def _bleu(question: Question, progress: ShowProgress) -> _Measured:
    beam = beam_of(question.beams, question.length_penalty)
    loaded = load_sequence(question.checkpoint, question.device, question.context)
    pairs = pairs_for(loaded, question.data, question.target, progress)
    return loaded.folder, bleu(loaded, pairs, beam, question.samples, progress)


def _lambada(question: Question, progress: ShowProgress) -> _Measured:
    assert question.data is not None, "measure() has looked"
    loaded = load_text(question.checkpoint, question.device, question.context)
    return loaded.folder, cloze_accuracy(loaded, question.data, progress)


def _masked(question: Question, progress: ShowProgress) -> _Measured:
    loaded = load_text(question.checkpoint, question.device, question.context, "masked")
    return loaded.folder, masked_accuracy(loaded, stream_for(loaded, question.data, progress), progress)


def _images(question: Question, progress: ShowProgress) -> _Measured:
    loaded = load_images(question.checkpoint, question.device)
    return loaded.folder, image_accuracy(loaded, question.data, progress)


@dataclass(frozen=True)
class _Task:
    """One measure. `options`: those of a question's that have an effect; `needs`: what --data must be."""

    measure: Callable[[Question, ShowProgress], _Measured]
    options: tuple[str, ...] = ()
    needs: str = ""


TASKS: dict[str, _Task] = {
    "perplexity": _Task(_perplexity, ("target", "stride", "context")),
    "bleu": _Task(_bleu, ("target", "context", "samples", "beams", "length-penalty")),
    "lambada": _Task(_lambada, ("context",), needs="a jsonl file with `text`, or a passage a line"),
    "masked-lm": _Task(_masked, ("context",)),
    "images": _Task(_images),
}


def measure(name: str, question: Question, progress: ShowProgress) -> _Measured:
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


def finite(facts: Facts) -> dict[str, Fact]:
    """The result with None for what is not finite: JSON has no word for it."""
    odd = {key for key, value in facts.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: None if key in odd else value for key, value in facts.items()}


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
