"""A user's script as a module of this process: what it defines, without what it does when it is run."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from types import ModuleType

SCRIPT = "meshwright_script"
"""The name of a user's script as a module."""


def load_script(path: Path, until: type[BaseException] | None = None) -> ModuleType:
    """A script's module, imported without running what stands under `if __name__ == "__main__"`. `until`: raised by
    the line at which the import ends, with what stands above it."""
    # Under another name than `__main__`: the guard of the script is false, and its job is not started once more.
    spec = importlib.util.spec_from_file_location(SCRIPT, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    with suppress(*([] if until is None else [until])):
        spec.loader.exec_module(module)
    return module
