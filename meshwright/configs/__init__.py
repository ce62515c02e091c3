"""The models, runs and clusters that the package brings: a family's in its folder, those of all families here."""

from __future__ import annotations

from pathlib import Path

SCHEMA = Path(__file__).resolve().with_name("run.schema.json")
"""JSON's schema of run files. `python -m meshwright config --schema` writes it, and a test holds it up to date."""


def shipped(kind: str) -> dict[str, Path]:
    """The files of `models`, `runs`, `clusters` or `software` by name, in the order of their names."""
    package = Path(__file__).resolve().parent.parent
    files = (*package.glob(f"configs/{kind}/*.yaml"), *package.glob(f"families/*/configs/{kind}/*.yaml"))
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}
