"""meshwright_parity, made from the modules of meshwright that parity imports: the same code under a name of its own.

Written anew beside this file at each build from the repository; a source distribution has it, and builds from that.
A name of its own, and not a part of `meshwright`: two distributions that both write into one package overwrite each
other's files, and the one that goes takes the other's with it. So both may be installed, and neither needs the other.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OURS = "meshwright_parity"
TARGET = HERE / OURS
IMPORT = re.compile(r"^ *(?:from|import) (meshwright[.\w]*)(?: import ([\w, ]+))?", re.MULTILINE)
LEFT_OUT = ("meshwright.ranks.launch.mpiexec",)
"""Checks start their ranks over torch alone."""
BASE = "base"
"""The folder of what parity shares with the rest of meshwright: how ranks start, errors, what a DTensor is."""


def file_of(module: str) -> Path | None:
    """The file of a module; None for a package, and for names that are none."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def needed() -> dict[str, Path]:
    """The modules that parity imports, and those that these import, by name. Packages' own files are left out: a room's
    imports what its other callers need."""
    waiting = [f"meshwright.parity.{path.stem}" for path in sorted((ROOT / "meshwright/parity").glob("*.py"))]
    waiting += ["meshwright.ranks.launch.preload"]  # imported by the process that ranks are forked from
    found: dict[str, Path] = {}
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if module in found or module in LEFT_OUT or path is None:
            continue
        found[module] = path
        for package, names in IMPORT.findall(path.read_text()):
            waiting += [package, *(f"{package}.{name.strip()}" for name in names.split(","))]
    return found


def renamed(text: str) -> str:
    """A module's text with the names that its imports have here."""
    text = re.sub(r"\bmeshwright\.parity\b", OURS, text)
    rooms = "|".join(sorted({module.split(".")[1] for module in needed()} - {"parity"}))
    return re.sub(rf"\bmeshwright\.({rooms})\b", rf"{OURS}.{BASE}.\1", text)


def place_of(module: str) -> Path:
    _, room, *rest = module.split(".")
    folders = rest if room == "parity" else [BASE, room, *rest]
    return TARGET.joinpath(*folders).with_suffix(".py")


def make() -> None:
    """Write the package beside this file."""
    shutil.rmtree(TARGET, ignore_errors=True)
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "meshwright/version.py").read_text(), re.MULTILINE)
    assert version is not None
    for module, path in needed().items():
        place = place_of(module)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(renamed(path.read_text()))
    for folder in (path for path in TARGET.rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()
    first = renamed((ROOT / "meshwright/parity/__init__.py").read_text())
    (TARGET / "__init__.py").write_text(f'{first}\n__version__ = "{version[1]}"\n')
    (TARGET / "py.typed").touch()
    shutil.copy(ROOT / "meshwright/parity/page.html", TARGET / "page.html")
    shutil.copy(ROOT / "LICENSE", HERE / "LICENSE")


if (ROOT / "meshwright/parity").is_dir():
    make()
setup(packages=find_packages(include=[f"{OURS}*"]))
