"""Meshwright: parallel training of Transformers in any mixture of the published strategies.

`import meshwright as mw` gives the names of docs/api.md. Each name is imported at the first use, since the command
line's help, and errors in a config, need none.
"""

from __future__ import annotations

from meshwright.ranks.imports import leave_current_folder

leave_current_folder(__name__)

import importlib  # noqa: E402 - not from the current folder
from typing import TYPE_CHECKING, Any  # noqa: E402

from meshwright.version import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from meshwright.api import compare, history, load, plan, resolve, save, train, verify
    from meshwright.config.registry import register
    from meshwright.ranks import launch
    from meshwright.training.checkpoint.reader import Checkpoint
    from meshwright.training.checkpoint.restore import restore
    from meshwright.training.parts import build
    from meshwright.training.step import train_step

__all__ = [
    "Checkpoint",
    "build",
    "compare",
    "history",
    "launch",
    "load",
    "plan",
    "register",
    "resolve",
    "restore",
    "save",
    "train",
    "train_step",
    "verify",
]

_HOMES = {
    "Checkpoint": "training.checkpoint.reader",
    "build": "training.parts",
    "register": "config.registry",
    "restore": "training.checkpoint.restore",
    "train_step": "training.step",
}
"""The modules of names that are not in api.py. Only `launch` is itself a module."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if name == "launch":
        return importlib.import_module("meshwright.ranks.launch")
    try:
        return vars(importlib.import_module(f"meshwright.{_HOMES.get(name, 'api')}"))[name]
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("meshwright."):
            raise
        rule = "is in none of the distributions that are installed: pip install meshwright"
        raise ImportError(f"mw.{name} {rule}") from error


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
