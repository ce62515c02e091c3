"""Images packed once into a folder that every rank maps (decoded, squared, split), and batches of them.

| file | holds |
|---|---|
| train-images.npy, validation-images.npy | [n, C, S, S] uint8 |
| train-labels.npy, validation-labels.npy | [n] int64, a class each |
| images.json | the facts below |

The held-out share is drawn class by class with a seed of its own, so that runs of every seed hold out the same images.
Images are stored in a seeded order: the first ones of a split are of all classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import ValidationError

from meshwright.config import Config
from meshwright.data.dataset import Opened, opened_splits
from meshwright.data.files import ShowProgress, file_sha256, folder_lock, silent, staged_folder
from meshwright.data.image_source import ImageSource, open_source
from meshwright.data.sampler import Permutation, ShuffledSamples
from meshwright.data.section import ImageData
from meshwright.data.split import SPLITS, Split
from meshwright.environment import cache_folder
from meshwright.errors import ConfigError, DataError
from meshwright.model import Batch
from meshwright.models.section import ImageNetwork
from meshwright.section import Positive, Section

_FORMAT: Literal[1] = 1
HEADER = ImageData.header
SPLIT_SEED, ORDER_SEED = 0, 1

_REMEDY = "remove the folder and start again"
_REPORT_EVERY = 64


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

    def count(self, split: Split) -> int:
        return self.train if split == "train" else self.validation


@dataclass(frozen=True)
class PackedImages:
    """An opened folder of packed images."""

    folder: Path
    header: ImagesHeader

    def images(self, split: Split) -> np.ndarray:
        """[n, C, S, S] uint8, mapped from the file and read-only."""
        size = self.header.image
        return self._map(images_file(split), (self.header.count(split), self.header.channels, size, size), "uint8")

    def labels(self, split: Split) -> np.ndarray:
        """[n] int64, mapped from the file and read-only."""
        return self._map(labels_file(split), (self.header.count(split),), "int64")

    def _map(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        path = self.folder / name
        try:
            array: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {_REMEDY}") from error
        if (array.shape, array.dtype) != (shape, np.dtype(dtype)):
            raise DataError(f"{path}: is {array.dtype} {array.shape}, its header says {dtype} {shape}; {_REMEDY}")
        return array


def images_file(split: Split) -> str:
    """The name of a split's file of pixels."""
    return f"{split}-images.npy"


def labels_file(split: Split) -> str:
    """The name of a split's file of classes."""
    return f"{split}-labels.npy"


def images_for(data: ImageData, model: ImageNetwork, cache: Path, progress: ShowProgress = silent) -> PackedImages:
    """The packed images that a config asks for, made once in `cache`; a folder that is there is checked whole.

    Raises DataError where an image or the packed folder is damaged; ConfigError where the model has too few classes, or
    data.validation no effect.
    """
    source = open_source(data.source)
    check_classes(source, data.source, model)
    if source.held_out is not None and data.validation != ImageData.model_fields["validation"].default:
        rule = f"has no effect: {data.source} has a validation folder"
        raise ConfigError.of("data.validation", data.validation, rule, "leave it out")
    facts = [_FORMAT, source.identity, model.image, model.channels, data.validation]
    out = cache / f"images-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    try:
        with folder_lock(out, progress):
            if (out / HEADER).is_file():
                return open_images(out, verify=True)
            with staged_folder(out) as folder:
                header = _write(folder, source, data.validation, model, progress)
                (folder / HEADER).write_text(header.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:  # no right to write there, a full disk
        raise DataError(f"packing images in {out}: {error.strerror}: {error.filename or out}") from error
    return open_images(out)


def open_images(folder: Path, verify: bool = False) -> PackedImages:
    """Open a packed folder; with `verify` every file's checksum is compared. Raises DataError naming the file."""
    path = folder / HEADER
    try:
        header = ImagesHeader.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no header of packed images ({error}); {_REMEDY}") from error
    if header.sha256.keys() != {name(split) for split in SPLITS for name in (images_file, labels_file)}:
        raise DataError(f"{path}: does not list the folder's files; {_REMEDY}")
    packed = PackedImages(folder, header)
    for split in SPLITS:
        packed.images(split)
        packed.labels(split)
    for name in sorted(header.sha256) if verify else []:
        if file_sha256(folder / name) != header.sha256[name]:
            raise DataError(f"{folder / name}: is damaged (its checksum is not the header's); {_REMEDY}")
    return packed


def check_classes(source: ImageSource, name: str, model: ImageNetwork) -> None:
    """Raises ConfigError where the model has fewer classes than the source."""
    if len(source.classes) > model.classes:
        rule = f"is fewer than the {len(source.classes)} classes of {name}"
        raise ConfigError.of("model.classes", model.classes, rule, f"{len(source.classes)} or more")


def split_images(source: ImageSource, share: float) -> dict[Split, np.ndarray]:
    """The numbers of each split's images, in their stored order. Raises DataError where a split would be empty."""
    held_out = source.held_out if source.held_out is not None else _drawn(source.labels, share)
    parts: dict[Split, np.ndarray] = {}
    for split, numbers in zip(SPLITS, (np.flatnonzero(~held_out), np.flatnonzero(held_out)), strict=True):
        if not numbers.size:
            raise DataError(f"{source.name}: leaves the {split} split without images; give more, or another share")
        parts[split] = numbers[Permutation(len(numbers), ORDER_SEED, 0)(np.arange(len(numbers)))]
    return parts


def _drawn(labels: np.ndarray, share: float) -> np.ndarray:
    """The images [n] that are held out: of each class its share, to the nearest whole image."""
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = Permutation(len(members), SPLIT_SEED, int(label))(np.arange(len(members)))
        held_out[members[order[: round(len(members) * share)]]] = True
    return held_out


def _write(
    folder: Path, source: ImageSource, share: float, model: ImageNetwork, progress: ShowProgress
) -> ImagesHeader:
    """Decode every image into its split's file; returns the header that describes them."""
    parts = split_images(source, share)
    total, done = len(source.labels), 0
    for split, numbers in parts.items():
        np.save(folder / labels_file(split), source.labels[numbers])
        shape = (len(numbers), model.channels, model.image, model.image)
        pixels = np.lib.format.open_memmap(folder / images_file(split), mode="w+", dtype=np.uint8, shape=shape)
        for row, number in enumerate(numbers.tolist()):
            pixels[row] = source.read(number, model.image, model.channels)
            done += 1
            if done % _REPORT_EVERY == 0:
                progress("decoding images", done / total)
        pixels.flush()
    files = [name(split) for split in SPLITS for name in (images_file, labels_file)]
    return ImagesHeader(
        source=source.name,
        image=model.image,
        channels=model.channels,
        classes=source.classes,
        train=len(parts["train"]),
        validation=len(parts["validation"]),
        sha256={name: file_sha256(folder / name) for name in files},
    )


class ImageSamples(ShuffledSamples):
    """One split of packed images: `images` [B, C, S, S] uint8 and `labels` [B, 1] int64."""

    def __init__(self, packed: PackedImages, split: Split, seed: int) -> None:
        self._images, self._labels = packed.images(split), packed.labels(split)
        super().__init__(len(self._labels), seed)

    def _read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        images, labels = np.asarray(self._images[rows]), np.asarray(self._labels[rows])
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels).unsqueeze(1)}


def prepare_images(data: ImageData, config: Config, progress: ShowProgress) -> Path:
    """The folder of a run's packed images."""
    assert isinstance(config.model, ImageNetwork), config.model
    packed = images_for(data, config.model, cache_folder(), progress)
    open_splits(config, packed.folder)
    return packed.folder


def open_splits(config: Config, folder: Path) -> Opened:
    """The images of a packed folder as a run reads them."""
    packed = open_images(folder)
    train, held_out = opened_splits(config, lambda split: ImageSamples(packed, split, config.seed))
    return Opened(train, held_out, None)
