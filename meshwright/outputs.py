"""Names of files and folders that commands write: one that exists is never replaced, and never to be deleted."""

from __future__ import annotations

import os
from itertools import chain, count
from pathlib import Path

from meshwright.errors import ConfigError


def free_path(path: Path) -> Path:
    """Return the path, or the first of `plan-2.yaml`, `plan-3.yaml`, ... that no file, folder or link has."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(each for each in chain([path], numbered) if not os.path.lexists(each))


def refuse_existing(option: str, path: Path | None) -> None:
    """Raise ConfigError if the file or folder that an option names exists."""
    if path is not None and os.path.lexists(path):
        raise ConfigError.of(option, path, "is there already", str(free_path(path)))
