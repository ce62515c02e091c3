"""A user's script imported as a module: its definitions, without its main part."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from types import ModuleType

SCRIPT = "meshwright_script"
"""The name of a user's script as a module."""


def load_script(path: Path, until: type[BaseException] | None = None) -> ModuleType:
    """A script's module, imported without the code under `if __name__ == "__main__"`. `until`: an exception that a line
    raises to end the import there; definitions above it are kept."""
    # Not named `__main__`, so that the script's main guard is false and its job is not started again.
    spec = importlib.util.spec_from_file_location(SCRIPT, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with suppress(*([] if until is None else [until])):
        spec.loader.exec_module(module)
    return module
