"""How often a classifier names an image's class: on what its run held out, or on images that it has never seen.

| --data | measured |
|---|---|
| none, or the run's own source | the run's held-out split |
| DIR with DIR/train and DIR/validation | DIR/validation |
| any other folder, or digits | all of it |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from meshwright.checkpoint import Checkpoint, find_checkpoint, load_weights
from meshwright.data.image_source import ImageSource, open_source
from meshwright.data.images import check_classes, split_images
from meshwright.data.progress import ShowProgress, silent
from meshwright.data.section import STDLIB, DataSection
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.chain import Chain, make_chain
from meshwright.models.section import ImageNetwork
from meshwright.parameters.shard import shard_specs
from meshwright.parts import DTYPES
from meshwright.ranks.mesh import solo_mesh
from meshwright.registry import entries
from meshwright.tensor.kit import WholeHead
from meshwright.tensor.serial import SerialKit
from meshwright.tools.evaluate.model import device_of

BATCH_IMAGES = 64
"""Images a forward pass."""


@dataclass(frozen=True)
class ImageModel:
    """A classifier of images in evaluation mode, and what its run read."""

    folder: Path
    shape: ImageNetwork
    data: DataSection
    model: Chain
    device: torch.device


@dataclass(frozen=True)
class ImageAccuracy:
    """Classes named right. `total_loss` in nats, over all images."""

    data: str
    classes: int
    images: int
    correct: int
    total_loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.images

    @property
    def loss(self) -> float:
        """The mean an image."""
        return self.total_loss / self.images

    @property
    def facts(self) -> dict[str, str | int | float]:
        return {
            "data": self.data,
            "classes": self.classes,
            "images": self.images,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "loss": self.loss,
        }


def load_image_model(path: Path, device: str = "auto") -> ImageModel:
    """The classifier of a step folder, or of a run's newest checkpoint, its weights as the run's optimizer held them.

    Raises CheckpointError where it reads something else, ConfigError for the device.
    """
    where = device_of(device)
    checkpoint = Checkpoint(find_checkpoint(path))
    config = checkpoint.config
    if not isinstance(config.model, ImageNetwork):
        families = " or ".join(name for name, family in entries("models").items() if issubclass(family, ImageNetwork))
        raise CheckpointError(f"{checkpoint.folder} is a {config.model.family}: this needs a {families}")
    mesh = solo_mesh(where)
    model = make_chain(config, SerialKit(mesh))
    model.to(DTYPES[config.precision.dtype] if config.precision.level == "O0" else torch.float32)
    load_weights(model, shard_specs(model), mesh, checkpoint)
    model.eval()
    return ImageModel(checkpoint.folder, config.model, config.data, model, where)


def image_accuracy(loaded: ImageModel, data: str | None, progress: ShowProgress = silent) -> ImageAccuracy:
    """Ask for the class of every image; classes are numbered by their names' order, as in the training.

    Raises DataError naming an image that cannot be read, ConfigError where the data has more classes than the model.
    """
    name = data if data is not None else loaded.data.source
    if data is None and name == STDLIB:  # imported, no run of ours
        raise ConfigError.of("--data", "none", f"leaves {loaded.folder} without images", "digits, a folder")
    source = open_source(name)
    check_classes(source, name, loaded.shape)
    numbers = _measured(source, name, loaded.data)
    head = cast(WholeHead, loaded.model.head)
    correct, total = 0, 0.0
    for start in range(0, len(numbers), BATCH_IMAGES):
        chosen = numbers[start : start + BATCH_IMAGES]
        pixels = np.stack([source.read(number, loaded.shape.image, loaded.shape.channels) for number in chosen])
        labels = torch.from_numpy(source.labels[chosen]).unsqueeze(1).to(loaded.device)
        with torch.no_grad():
            h = loaded.model.trunk({"images": torch.from_numpy(pixels).to(loaded.device)})[:, :1]
        correct += head.num_correct(h, labels)
        total += float(head.token_losses(h, labels).double().sum())
        progress("images", min(1.0, (start + BATCH_IMAGES) / len(numbers)))
    return ImageAccuracy(name, len(source.classes), len(numbers), correct, total)


def _measured(source: ImageSource, name: str, trained_on: DataSection) -> np.ndarray:
    """The numbers of the images to ask for."""
    if name == trained_on.source or source.held_out is not None:
        return split_images(source, trained_on.validation)["validation"]
    return np.arange(len(source.labels))
