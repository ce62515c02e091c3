"""Images as a run reads them: batches of `images` [B, C, S, S] uint8 and `labels` [B, 1] int64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.config import Config
from meshwright.data.dataset import Opened, check_held_out
from meshwright.data.images_packed import PackedImages, images_for, open_images
from meshwright.data.sampler import Sampler
from meshwright.data.split import Split
from meshwright.environment import cache_folder
from meshwright.model import Batch
from meshwright.models.section import ImageNetwork


class ImageSamples:
    """One split of packed images."""

    def __init__(self, packed: PackedImages, split: Split, seed: int) -> None:
        self._images = packed.images(split)
        self._labels = packed.labels(split)
        self._order = Sampler(len(self._labels) + 1, 1, seed)  # an image is a window of one

    def __len__(self) -> int:
        """Images in the split."""
        return len(self._labels)

    def samples(self, first: int, count: int) -> Batch:
        """`images` and `labels` of samples first ... first + count - 1 of the run, shuffled anew in each epoch."""
        return self._read(self._order.rows(first, count))

    def held_out(self, first: int, count: int) -> Batch:
        """As `samples`, in the file's order."""
        assert 0 <= first <= first + count <= len(self), (first, count, len(self))
        return self._read(np.arange(first, first + count, dtype=np.int64))

    def _read(self, rows: np.ndarray) -> Batch:
        images, labels = np.asarray(self._images[rows]), np.asarray(self._labels[rows])
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels).unsqueeze(1)}


class ImageDataset:
    """The digits, or a folder of class folders."""

    def prepare(self, config: Config, report: Any) -> Path:
        assert isinstance(config.model, ImageNetwork), config.model
        packed = images_for(config.data, config.model, cache_folder(), report)
        self.open(config, packed.folder)
        return packed.folder

    def open(self, config: Config, folder: Path) -> Opened:
        packed = open_images(folder)
        held_out = None
        if config.validation.every:
            held_out = ImageSamples(packed, "validation", config.seed)
            check_held_out(held_out, config)
        return Opened(ImageSamples(packed, "train", config.seed), held_out, None)


IMAGES = ImageDataset()
