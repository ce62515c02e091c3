"""The command line. Each command reads arguments and calls one function of another package.

Heavy modules are imported inside of commands, so that help and mistakes in a config are shown at once.
"""

from meshwright.cli import runs, adopt, parity, config, weights  # isort: skip - the order of commands in the help
from meshwright.cli.app import app, main

__all__ = ["adopt", "app", "config", "main", "parity", "runs", "weights"]
