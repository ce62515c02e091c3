"""The accuracy of a classifier of images.

| --data | measured |
|---|---|
| none, or the run's own source | the run's held-out split |
| DIR with DIR/train and DIR/validation | DIR/validation |
| any other folder, or digits | all images |
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from meshwright.data.files import ShowProgress, silent
from meshwright.data.section import STDLIB
from meshwright.families.vision.images import open_source
from meshwright.families.vision.section import ImageNetwork
from meshwright.ranks.errors import ConfigError
from meshwright.tools.evaluate.load import Facts, Loaded, load_model
from meshwright.tools.evaluate.tasks import Question, Task

BATCH_IMAGES = 64
"""Images a forward pass."""


@torch.inference_mode()
def image_accuracy(loaded: Loaded, data: str | None, progress: ShowProgress = silent) -> Facts:
    """Measure accuracy and loss over images; classes are numbered in the order of names, as in training.

    Raises DataError with the path of an unreadable image, ConfigError if the data has more classes than the model.
    """
    model, trained_on = loaded.config.model, loaded.config.data
    assert isinstance(model, ImageNetwork), model
    name = data if data is not None else trained_on.source
    if data is None and name == STDLIB:  # an imported checkpoint, which has no run with images
        raise ConfigError.of("--data", "none", f"leaves {loaded.folder} without images", "digits, a folder")
    source = open_source(name)
    source.check_classes(name, model)
    numbers = np.arange(len(source.labels))
    # Training images are excluded, since these would make the accuracy look too good.
    if name == trained_on.source or source.held_out is not None:
        numbers = source.split(trained_on.validation)["validation"]
    correct, total = 0, 0.0
    for start in range(0, len(numbers), BATCH_IMAGES):
        chosen = numbers[start : start + BATCH_IMAGES]
        pixels = np.stack([source.read(index, model.image, model.channels) for index in chosen])
        labels = torch.from_numpy(source.labels[chosen]).unsqueeze(1).to(loaded.device)
        h = loaded.model.hidden_states({"images": torch.from_numpy(pixels).to(loaded.device)})[0][:, :1]
        correct += int(loaded.head.num_correct(h, labels))
        total += float(loaded.head.token_losses(h, labels).double().sum())
        progress("images", min(1.0, (start + BATCH_IMAGES) / len(numbers)))
    return {
        "data": name,
        "classes": len(source.classes),
        "images": len(numbers),
        "correct": correct,
        "accuracy": correct / len(numbers),
        "loss": total / len(numbers),
    }


def measure(question: Question, progress: ShowProgress) -> tuple[Path, Facts]:
    """Measure accuracy on the question's or the held-out images; return the checkpoint's folder and facts."""
    loaded = load_model(question.checkpoint, question.device, "images")
    return loaded.folder, image_accuracy(loaded, question.data, progress)


IMAGES = Task(measure)
