"""The run's configuration: schema (nouns), rules (what must fit together), load (YAML and overrides)."""

from meshwright.config.load import dump_config, dump_tree, load_config, model_names, parse_config, parse_run, run_text
from meshwright.config.schema import Config

__all__ = ["Config", "dump_config", "dump_tree", "load_config", "model_names", "parse_config", "parse_run", "run_text"]
