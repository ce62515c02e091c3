"""The tasks of `meshwright eval`, the options of each task, and results as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.config.registry import entries
from meshwright.data.files import ShowProgress
from meshwright.ranks.errors import ConfigError
from meshwright.tools.evaluate.load import Facts

Fact = str | int | float | None


@dataclass(frozen=True)
class Question:
    """The command's options; None: not given."""

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
    task: str = ""
    """The task as typed, such as `lm-eval:hellaswag,arc_easy`; set by `measure`."""

    @property
    def options(self) -> dict[str, int | float | str | None]:
        """The options that only some tasks read, named as typed."""
        common = ("checkpoint", "device", "data", "task")
        return {name.replace("_", "-"): value for name, value in vars(self).items() if name not in common}


@dataclass(frozen=True)
class Task:
    """A measure of a checkpoint. `measure` returns the step folder and the result."""

    measure: Callable[[Question, ShowProgress], tuple[Path, Facts]]
    options: tuple[str, ...] = ()
    """The options that the task reads, named as typed."""
    needs_data: str = ""
    """A description of the data that --data must name, if no run holds out such data; else empty."""
    takes_names: bool = False
    """Whether the task is typed as `TASK:NAMES`."""


def measure(name: str, question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Run the task; return the step folder and the result.

    Raises ConfigError if there is no such task, or an option has no effect; PluginError if a task of another package
    cannot be used.
    """
    tasks: dict[str, Task] = entries("eval")
    shown = {f"{known}:NAME" if task.takes_names else known: task for known, task in tasks.items()}
    task_name, colon, names = name.partition(":")
    if task_name not in tasks or tasks[task_name].takes_names != bool(colon and names):
        raise ConfigError.of("--task", name, "is no task", ", ".join(shown))
    task = tasks[task_name]
    if task.needs_data and question.data is None:
        raise ConfigError.of("--task", name, "needs --data", task.needs_data)
    for option, value in question.options.items():
        # An option without an effect is refused: else the result would be taken for one with the option applied.
        if value is not None and option not in task.options:
            suitable = ", ".join(candidate for candidate, known in shown.items() if option in known.options)
            raise ConfigError.of(f"--{option}", value, f"has no effect on --task {name}", f"--task {suitable}")
    return task.measure(replace(question, task=name), progress)


def finite(facts: Facts) -> dict[str, Fact]:
    """Return the result with None for numbers that are not finite, since JSON has no such numbers."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()
    }


def table_of(facts: Mapping[str, Fact]) -> str:
    """Format the result with one fact per line."""
    width, lines = max(map(len, facts)), []
    for key, value in facts.items():
        shown = value if isinstance(value, str) else "not finite" if value is None else f"{value:,}"
        if isinstance(value, float):  # four decimals; very small or large numbers in scientific notation
            shown = f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
        lines.append(f"{key.replace('_', ' '):<{width}}  {shown}")
    return "\n".join(lines)
