"""Meshwright: parallel training of Transformers in any mixture of the published strategies."""

__version__ = "0.1.0"
