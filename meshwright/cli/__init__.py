"""The command line. Each command reads its arguments and calls one function of another package.

Heavy modules are imported inside of commands, so that help and a mistake in a config are shown at once.
"""

from meshwright.cli import runs, parity, config, weights  # isort: skip - in the order in which the help lists their commands
from meshwright.cli.app import app, main

__all__ = ["app", "config", "main", "parity", "runs", "weights"]
