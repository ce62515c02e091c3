"""The command line. Each command loads what it is given and calls one function of a room; nothing heavy is imported
before it is needed, so that help and a mistake in a config come at once."""

from meshwright.cli import runs, parity, config, weights  # isort: skip - in the order in which the help lists their commands
from meshwright.cli.app import app, main

__all__ = ["app", "config", "main", "parity", "runs", "weights"]
