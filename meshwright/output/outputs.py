"""Names for the files and folders that commands write. An existing file or folder is never replaced or deleted."""

from __future__ import annotations

import os
import sys
from itertools import chain, count
from pathlib import Path

from meshwright.ranks.errors import ConfigError
from meshwright.ranks.streams import say


def free_path(path: Path) -> Path:
    """Return the path, or the first of `plan-2.yaml`, `plan-3.yaml`, ... that no file, folder or link has."""
    numbered = (path.with_name(f"{path.stem}-{index}{path.suffix}") for index in count(2))
    return next(each for each in chain([path], numbered) if not os.path.lexists(each))


def new_path(path: Path) -> Path:
    """Return a free path for a command's default output.

    If the default is taken, a line on stderr names the new path before the work begins, so that a user does not take
    the older file for the result.
    """
    free = free_path(path)
    if free != path:
        say(f"{path} is there already: this command writes {free}", file=sys.stderr)
    return free


def refuse_existing(option: str, path: Path | None) -> None:
    """Raise ConfigError if the file or folder that an option names exists."""
    if path is not None and os.path.lexists(path):
        raise ConfigError.of(option, path, "is there already", str(free_path(path)))
