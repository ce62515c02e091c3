"""The version of the package, at its ground: checkpoints name it without the package's face."""

__version__ = "0.3.0"
