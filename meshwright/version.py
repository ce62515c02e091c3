"""The version and the folder of the package, in a module without imports from the package."""

from pathlib import Path

__version__ = "0.3.0"

PACKAGE = Path(__file__).parent
