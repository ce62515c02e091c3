"""Which layouts are asked for: from the command's words to entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.compare.layouts import Entry, from_files, told_apart
from meshwright.compare.predicted import Foresight
from meshwright.data.progress import Progress, silent
from meshwright.errors import ConfigError
from meshwright.machine import usable_cores
from meshwright.plan.auto import load_free
from meshwright.plan.space import fixed_fields


@dataclass(frozen=True)
class Asked:
    """`words`: `key=value`, for every layout. `files`: of layouts. `top`: so many of the planner's, on `devices`."""

    run: Path
    words: Sequence[str]
    files: Sequence[Path]
    top: int | None = None
    devices: int | None = None


def split_words(words: Sequence[str], files: Sequence[Path]) -> tuple[list[str], list[Path]]:
    """The overrides, and all files: `--layouts a.yaml b.yaml` gives the option the first, and words the rest.

    A word without `=` is a file then. Without --layouts it stays a word, and is refused as an override.
    """
    more = [Path(word) for word in words if "=" not in word] if files else []
    return [word for word in words if "=" in word or not files], [*files, *more]


def entries_of(asked: Asked, foresight: Foresight, report: Progress = silent) -> list[Entry]:
    """The files' layouts, then the planner's.

    Raises ConfigError for a mistake in a file, where the search does, and where nothing is asked for.
    """
    if asked.devices is not None and asked.top is None:
        raise ConfigError.of(
            "--devices", asked.devices, "says what to plan for, and nothing is planned", "with --top K"
        )
    if not asked.files and asked.top is None:
        raise ConfigError.of("--layouts", "none", "leaves nothing to compare", "--layouts FILE ..., or --top K")
    entries = from_files(asked.run, asked.words, asked.files) if asked.files else []
    if asked.top is None:
        return entries
    devices = asked.devices or torch.cuda.device_count() or usable_cores()
    config = load_free(asked.run, asked.words)
    return told_apart([*entries, *foresight.best(config, devices, asked.top, fixed_fields(asked.words), report)])
