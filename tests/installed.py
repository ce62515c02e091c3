"""Installs a package's metadata into a folder."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, points: dict[str, dict[str, str]], package: str = "meshwright-toys") -> None:
    """Write a package's metadata as pip does."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = (f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in points.items())
    (info / "entry_points.txt").write_text("\n".join(groups))
