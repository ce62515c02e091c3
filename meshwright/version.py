"""The version of the package and its folder, at its ground: nobody below needs the package's face for them."""

from pathlib import Path

__version__ = "0.3.0"

PACKAGE = Path(__file__).parent
