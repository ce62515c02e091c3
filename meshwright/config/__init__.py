"""The run's configuration: schema (nouns), rules (conditions on several fields), load (YAML and overrides).

The names below are imported at first use, since the schema imports the sections and the registry, which are modules of
this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.config.load import (
        dump_config,
        dump_tree,
        load_config,
        model_names,
        parse_config,
        parse_run,
        run_text,
    )
    from meshwright.config.schema import Config

__all__ = ["Config", "dump_config", "dump_tree", "load_config", "model_names", "parse_config", "parse_run", "run_text"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    home = "schema" if name == "Config" else "load"
    return vars(importlib.import_module(f"{__name__}.{home}"))[name]
