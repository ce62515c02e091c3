"""The run's configuration: schema (nouns), rules (what must fit together), load (YAML and overrides)."""

from meshwright.config.load import dump_config, load_config, model_names, parse_config
from meshwright.config.schema import Config

__all__ = ["Config", "dump_config", "load_config", "model_names", "parse_config"]
