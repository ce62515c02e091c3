"""The models, runs and clusters in the package: of one family in the family's folder, of all families here."""

from __future__ import annotations

from pathlib import Path

SCHEMA = Path(__file__).resolve().with_name("run.schema.json")
"""The JSON schema of run files, written by `python -m meshwright config --schema` and checked by a test."""


def shipped(folder: str) -> dict[str, Path]:
    """Return the files of `models`, `runs`, `clusters` or `software` by name, sorted by name."""
    package = Path(__file__).resolve().parent.parent
    files = (*package.glob(f"configs/{folder}/*.yaml"), *package.glob(f"families/*/configs/{folder}/*.yaml"))
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}
