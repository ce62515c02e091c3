"""Packed images: decoded, square and split once into a folder that every rank maps; and the batches of these images.

| source | holds | held out |
|---|---|---|
| digits | 1797 handwritten digits of 8 x 8 grey pixels (Alpaydin & Kaynak, 1998), in scikit-learn's package | a share |
| DIR/CLASS/*.jpg, jpeg, png | a folder a class | a share |
| DIR/train/CLASS/*, DIR/validation/CLASS/* | the same twice | DIR/validation |

| file | holds |
|---|---|
| train-images.npy, validation-images.npy | [n, C, S, S] uint8 |
| train-labels.npy, validation-labels.npy | [n] int64, a class each |
| images.json | `ImagesHeader` |

Classes are numbered in the order of names. An image is scaled until the shorter side has the model's size, and the
middle square is kept. The held-out share is drawn class by class with a fixed seed, so that runs of every seed hold out
the same images. Images are stored in a seeded order, so that the first images of a split have all classes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError

from meshwright.compute.model import Batch
from meshwright.config import Config
from meshwright.config.section import Positive, Section
from meshwright.data.dataset import Opened, open_splits
from meshwright.data.files import ShowProgress, file_sha256, folder_lock, silent, staged_folder
from meshwright.data.sampler import Permutation, ShuffledSamples
from meshwright.data.section import DIGITS
from meshwright.data.split import SPLITS, Split
from meshwright.families.vision.data_section import ImageData
from meshwright.families.vision.section import ImageNetwork
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.foreign import plain, read_text

HEADER = ImageData.header
_FORMAT: Literal[1] = 1
_SPLIT_SEED, _ORDER_SEED = 0, 1
_FILES = frozenset(f"{split}-{content}.npy" for split in SPLITS for content in ("images", "labels"))

_REMEDY = "move the folder aside and start again"
_REPORT_EVERY = 64

_MODES = {1: "L", 3: "RGB"}
_EIGHT_BIT = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
"""Pillow's modes that are converted to grey or RGB of 8 bits without a loss of range."""


@dataclass(frozen=True)
class ImageSource:
    """The images of a source by number. `read(number, size, channels)` decodes an image: [C, S, S] of uint8."""

    identity: str
    """A text that changes with the content of the source."""
    name: str
    """The name in headers and messages, without a path of this machine."""
    classes: tuple[str, ...]
    labels: np.ndarray
    """[n] int64."""
    held_out: np.ndarray | None
    """[n] bool, if the source has a validation folder; None: a share is held out."""
    read: Callable[[int, int, int], np.ndarray]

    def check_classes(self, source: str, model: ImageNetwork) -> None:
        """Raise ConfigError if the model has fewer classes than `source`, the name that the user wrote."""
        if len(self.classes) > model.classes:
            rule = f"is fewer than the {len(self.classes)} classes of {source}"
            raise ConfigError.of("model.classes", model.classes, rule, f"{len(self.classes)} or more")

    def split(self, share: float) -> dict[Split, np.ndarray]:
        """Return the numbers of each split's images, in the stored order. Raises DataError for an empty split."""
        held_out = self.held_out
        if held_out is None:
            held_out = np.zeros(len(self.labels), dtype=bool)
            for label in np.unique(self.labels):  # the share of each class, to the nearest whole image
                members = np.flatnonzero(self.labels == label)
                # A fixed seed, not the run's, so that all runs share one packed folder and one held-out set.
                order = Permutation(len(members), _SPLIT_SEED, int(label))(np.arange(len(members)))
                held_out[members[order[: round(len(members) * share)]]] = True
        parts: dict[Split, np.ndarray] = {"train": np.flatnonzero(~held_out), "validation": np.flatnonzero(held_out)}
        for split, numbers in parts.items():
            if not numbers.size:
                raise DataError(f"{self.name}: leaves the {split} split without images; give more, or another share")
            parts[split] = numbers[Permutation(len(numbers), _ORDER_SEED, 0)(np.arange(len(numbers)))]
        return parts


def open_source(source: str) -> ImageSource:
    """Find the images of `digits` or of a folder. Raises DataError with the name of a missing or invalid file."""
    if source != DIGITS:
        return _folder(Path(source).expanduser())
    dataset: Any = _library("sklearn.datasets", "scikit-learn").load_digits()
    # scikit-learn's grey levels go to 16.
    pixels = np.round(dataset.images * (255 / 16)).astype(np.uint8)  # [n, 8, 8], grey levels 0..16
    image = _library("PIL.Image", "pillow")
    labels = dataset.target.astype(np.int64)
    return ImageSource(
        DIGITS, DIGITS, tuple(map(str, range(10))), labels, None,
        lambda index, size, channels: _squared(image.fromarray(pixels[index]), size, channels),
    )  # fmt: skip


def _folder(folder: Path) -> ImageSource:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder (give `{DIGITS}`, or a folder of class folders)")
    image = _library("PIL.Image", "pillow")
    splits = [folder / split for split in SPLITS]
    is_split = all(path.is_dir() for path in splits)
    by_split = [_class_files(path) for path in (splits if is_split else [folder])]
    classes = tuple(by_split[0])
    if is_split and (unknown := set(by_split[1]) - set(classes)):
        raise DataError(f"{splits[1] / min(unknown)}: is a class that {splits[0]} has not")
    files, labels, held_out = [], [], []
    for split, by_class in enumerate(by_split):
        for name, paths in by_class.items():
            files += paths
            labels += [classes.index(name)] * len(paths)
            held_out += [split == 1] * len(paths)

    def read(index: int, size: int, channels: int) -> np.ndarray:
        path = files[index]
        try:
            with image.open(path) as picture:
                if picture.mode not in _EIGHT_BIT:
                    raise DataError(f"{path}: has pixels of more than 8 bits (mode {picture.mode}); convert it first")
                return _squared(picture, size, channels)
        except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
            raise DataError(f"{path}: cannot be decoded ({error}); mend it, or move it out of the folder") from error

    # Sizes and times identify the content: reading every image would take as long as packing again.
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = hashlib.sha256(json.dumps([str(folder.resolve()), facts]).encode()).hexdigest()
    fixed = np.array(held_out) if is_split else None
    return ImageSource(identity, folder.resolve().name, classes, np.array(labels, np.int64), fixed, read)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """Return the images of each class folder. Hidden files are ignored; any other file raises DataError."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise DataError(f"{folder}: holds no class folders (FOLDER/CLASS/IMAGE.jpg, jpeg or png)")
    by_class = {}
    for path in classes:
        plain(path, folder)
        files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        for file in files:
            if file.suffix.lower() not in (".jpg", ".jpeg", ".png") or not file.is_file():
                raise DataError(f"{file}: is no image; a class folder holds jpg, jpeg and png files alone")
            plain(file, folder)
        if not files:
            raise DataError(f"{path}: is a class without images")
        by_class[path.name] = files
    return by_class


def _squared(picture: Any, size: int, channels: int) -> np.ndarray:
    """Turn a picture upright, convert its channels, scale the shorter side to `size`, keep the middle: [C, S, S]."""
    operations = _library("PIL.ImageOps", "pillow")
    # A camera's picture may be stored rotated, with the orientation in the EXIF data.
    upright = operations.exif_transpose(picture).convert(_MODES[channels])
    fitted = operations.fit(upright, (size, size), method=_library("PIL.Image", "pillow").Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(fitted).reshape(size, size, channels).transpose(2, 0, 1))


def _library(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"images need {package}, which is not installed: pip install 'meshwright[images]'") from error


class ImagesHeader(Section):
    """The content of images.json."""

    format: Literal[1] = _FORMAT
    source: str
    image: Positive
    channels: Positive
    classes: tuple[str, ...]
    train: Positive
    validation: Positive
    """Images of each split."""
    sha256: dict[str, str]
    """Checksums of the folder's other files."""


@dataclass(frozen=True)
class PackedImages:
    """An opened folder of packed images."""

    folder: Path
    header: ImagesHeader

    def array(self, split: Split, content: Literal["images", "labels"]) -> np.ndarray:
        """Map a file read-only: `images` [n, C, S, S] uint8, or `labels` [n] int64."""
        path, header = self.folder / f"{split}-{content}.npy", self.header
        dtype, dims = ("uint8", (header.channels, header.image, header.image)) if content == "images" else ("int64", ())
        shape = (header.train if split == "train" else header.validation, *dims)
        try:
            array: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
        if (array.shape, array.dtype) != (shape, np.dtype(dtype)):
            raise DataError(f"{path}: is {array.dtype} {array.shape}, its header says {dtype} {shape}; {_REMEDY}")
        return array


def images_for(data: ImageData, model: ImageNetwork, cache: Path, progress: ShowProgress = silent) -> PackedImages:
    """Open the packed images of a config; pack the images first if `cache` does not have them.

    An existing folder is checked completely. Raises DataError if an image or the packed folder is damaged, and
    ConfigError if the model has too few classes or data.validation has no effect.
    """
    source = open_source(data.source)
    source.check_classes(data.source, model)
    if source.held_out is not None and data.validation != ImageData.model_fields["validation"].default:
        rule = f"has no effect: {data.source} has a validation folder"
        raise ConfigError.of("data.validation", data.validation, rule, "leave it out")
    # The folder's name is a hash of everything that the packed pixels depend on, so no stale folder is read.
    facts = [_FORMAT, source.identity, model.image, model.channels, data.validation]
    out = cache / f"images-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    try:
        with folder_lock(out, progress):
            if (out / HEADER).is_file():
                # All checksums, once a run: a flipped bit in a pixel would be learned silently.
                return open_images(out, verify=True)
            with staged_folder(out) as folder:
                _write(folder, source, data.validation, model, progress)
    except OSError as error:  # no right to write there, a full disk
        raise DataError(f"packing images in {out}: {error.strerror}: {error.filename or out}") from error
    return open_images(out)


def _write(folder: Path, source: ImageSource, share: float, model: ImageNetwork, progress: ShowProgress) -> None:
    """Decode every image into its split's file, and write the header last."""
    parts = source.split(share)
    done = 0
    for split, numbers in parts.items():
        np.save(folder / f"{split}-labels.npy", source.labels[numbers])
        shape = (len(numbers), model.channels, model.image, model.image)
        pixels = np.lib.format.open_memmap(folder / f"{split}-images.npy", mode="w+", dtype=np.uint8, shape=shape)
        for row, index in enumerate(numbers.tolist()):
            pixels[row] = source.read(index, model.image, model.channels)
            done += 1
            if done % _REPORT_EVERY == 0:
                progress("decoding images", done / len(source.labels))
        pixels.flush()
    header = ImagesHeader(
        source=source.name,
        image=model.image,
        channels=model.channels,
        classes=source.classes,
        train=len(parts["train"]),
        validation=len(parts["validation"]),
        sha256={name: file_sha256(folder / name) for name in sorted(_FILES)},
    )
    (folder / HEADER).write_text(header.model_dump_json(indent=2) + "\n", encoding="utf-8")


def open_images(folder: Path, verify: bool = False) -> PackedImages:
    """Open a packed folder; `verify` compares the checksum of every file. Raises DataError with the damaged file."""
    path = folder / HEADER
    try:
        header = ImagesHeader.model_validate_json(read_text(path))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no header of packed images ({error}); {_REMEDY}") from error
    if header.sha256.keys() != _FILES:
        raise DataError(f"{path}: does not list the folder's files; {_REMEDY}")
    packed = PackedImages(folder, header)
    for split in SPLITS:
        packed.array(split, "images")
        packed.array(split, "labels")
    for name in sorted(header.sha256) if verify else []:
        if file_sha256(folder / name) != header.sha256[name]:
            raise DataError(f"{folder / name}: is damaged (its checksum is not the header's); {_REMEDY}")
    return packed


class ImageSamples(ShuffledSamples):
    """One split of packed images: `images` [B, C, S, S] uint8 and `labels` [B, 1] int64."""

    def __init__(self, packed: PackedImages, split: Split, seed: int) -> None:
        self._images, self._labels = packed.array(split, "images"), packed.array(split, "labels")
        super().__init__(len(self._labels), seed)

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        images, labels = np.asarray(self._images[rows]), np.asarray(self._labels[rows])
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels).unsqueeze(1)}


def prepare_images(data: ImageData, config: Config, progress: ShowProgress) -> Path:
    """Pack the images of a run; return the folder. Raises DataError or ConfigError if the run cannot use the images."""
    assert isinstance(config.model, ImageNetwork), config.model
    packed = images_for(data, config.model, cache_folder(), progress)
    data.open(config, packed.folder)
    return packed.folder


def open_image_splits(data: ImageData, config: Config, folder: Path) -> Opened:
    """Open the splits of packed images. Raises DataError if a split is too small."""
    packed = open_images(folder)
    return open_splits(config, lambda split: (ImageSamples(packed, split, config.seed), ""))
