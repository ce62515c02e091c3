"""The sources of images: scikit-learn's digits, or a folder of class folders. Decoded by Pillow, square, uint8.

| source | holds | held out |
|---|---|---|
| digits | 1797 handwritten digits of 8 x 8 grey pixels (Alpaydin & Kaynak, 1998), in scikit-learn's package | a share |
| DIR/CLASS/*.jpg, jpeg, png | a folder a class | a share |
| DIR/train/CLASS/*, DIR/validation/CLASS/* | the same twice | as the folders say |

Classes are numbered in the order of their names. An image's shorter side becomes the model's, and its middle is cut
out.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from meshwright.data.section import DIGITS
from meshwright.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
TRAIN, VALIDATION = "train", "validation"

_MODES = {1: "L", 3: "RGB"}
_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
"""Pillow's modes that turn into grey or RGB of 8 bits without a loss of range."""


@dataclass(frozen=True)
class ImageSource:
    """The images of a source by number. `read(number, size, channels)` decodes one: [C, S, S] of uint8."""

    identity: str
    """Changes when the source does."""
    name: str
    """Without a path of this machine."""
    classes: tuple[str, ...]
    labels: np.ndarray
    """[n] int64."""
    held_out: np.ndarray | None
    """[n] bool, where the source itself says; None: a share is to be held out."""
    read: Callable[[int, int, int], np.ndarray]


def open_source(source: str) -> ImageSource:
    """Find the images of `digits` or of a folder. Raises DataError naming what is missing or cannot be an image."""
    return _digits() if source == DIGITS else _folder(Path(source).expanduser())


def _digits() -> ImageSource:
    dataset: Any = _library("sklearn.datasets", "scikit-learn").load_digits()
    pixels = np.round(dataset.images * (255 / 16)).astype(np.uint8)  # [n, 8, 8], grey levels 0..16
    image = _library("PIL.Image", "pillow")

    def read(number: int, size: int, channels: int) -> np.ndarray:
        return _squared(image.fromarray(pixels[number]), size, channels)

    labels = dataset.target.astype(np.int64)
    return ImageSource(DIGITS, DIGITS, tuple(map(str, range(10))), labels, None, read)


def _folder(folder: Path) -> ImageSource:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder (give `{DIGITS}`, or a folder of class folders)")
    image = _library("PIL.Image", "pillow")
    splits = [folder / TRAIN, folder / VALIDATION]
    given = all(path.is_dir() for path in splits)
    by_split = [_class_files(path) for path in (splits if given else [folder])]
    classes = tuple(by_split[0])
    if given and (unknown := set(by_split[1]) - set(classes)):
        raise DataError(f"{splits[1] / min(unknown)}: is a class that {splits[0]} has not")
    files, labels, held_out = [], [], []
    for split, by_class in enumerate(by_split):
        for name, paths in by_class.items():
            files += paths
            labels += [classes.index(name)] * len(paths)
            held_out += [split == 1] * len(paths)

    def read(number: int, size: int, channels: int) -> np.ndarray:
        return _decoded(image, files[number], size, channels)

    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = hashlib.sha256(json.dumps([str(folder.resolve()), facts]).encode()).hexdigest()
    fixed = np.array(held_out) if given else None
    return ImageSource(identity, folder.resolve().name, classes, np.array(labels, np.int64), fixed, read)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The images of each class folder, hidden files aside. Any other file is a mistake: none is skipped silently."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise DataError(f"{folder}: holds no class folders (FOLDER/CLASS/IMAGE.jpg, jpeg or png)")
    by_class = {}
    for path in classes:
        files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        for file in files:
            if file.suffix.lower() not in SUFFIXES or not file.is_file():
                raise DataError(f"{file}: is no image; a class folder holds jpg, jpeg and png files alone")
        if not files:
            raise DataError(f"{path}: is a class without images")
        by_class[path.name] = files
    return by_class


def _decoded(image: ModuleType, path: Path, size: int, channels: int) -> np.ndarray:
    """Raises DataError naming the file where it is no whole image."""
    try:
        with image.open(path) as opened:
            if opened.mode not in _EIGHT_BIT:
                raise DataError(f"{path}: has pixels of more than 8 bits (mode {opened.mode}); convert it first")
            return _squared(opened, size, channels)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}); mend or remove it") from error


def _squared(picture: Any, size: int, channels: int) -> np.ndarray:
    """Upright, in the wanted channels, its shorter side `size`, the middle of the longer: [C, S, S]."""
    operations = _library("PIL.ImageOps", "pillow")
    upright = operations.exif_transpose(picture).convert(_MODES[channels])
    fitted = operations.fit(upright, (size, size), method=_library("PIL.Image", "pillow").Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(fitted).reshape(size, size, channels).transpose(2, 0, 1))


def _library(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"images need {package}, which is not installed: pip install 'meshwright[images]'") from error
