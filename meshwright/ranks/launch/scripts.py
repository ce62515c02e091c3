"""A user's script imported as a module: the definitions without the main part."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

SCRIPT = "meshwright_script"
"""The name of a user's script as a module."""


def load_script(path: Path, until: type[BaseException] | None = None) -> ModuleType:
    """Import a script as a module, without the code under `if __name__ == "__main__"`.

    `until`: an exception that ends the import at the raising line; definitions above that line are kept.
    """
    # Not named `__main__`, so that the script's main guard is false and the job is not started again.
    spec = importlib.util.spec_from_file_location(SCRIPT, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    # dataclasses and typing look a class's module up by name, for annotations that are text.
    sys.modules[SCRIPT] = module = importlib.util.module_from_spec(spec)
    with suppress(*([] if until is None else [until])):
        spec.loader.exec_module(module)
    return module
