"""The config's fields, by dotted name."""

from __future__ import annotations

from meshwright.config import Config
from meshwright.config.messages import inlined, paths_in

FIELDS = set(paths_in(inlined(schema := Config.model_json_schema(), schema["$defs"])))
