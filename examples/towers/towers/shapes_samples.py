"""Samples of coloured shapes: every 4,096 in a row have all captions, each once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from meshwright.compute.model import Batch
from meshwright.compute.parameters.shard import seed_of
from meshwright.config import Config
from meshwright.data.dataset import Opened
from meshwright.data.sampler import Permutation
from towers.section import TwoTowers
from towers.shapes import Shapes

COLOURS = ("red", "green", "blue", "yellow", "cyan", "magenta", "white", "grey")
LIGHT = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1), (0.5, 0.5, 0.5))
FORMS = ("disc", "square", "cross", "ring")
PLACES = tuple(product(("top", "bottom"), ("left", "right")))
WORDS = ("a", "and", "at", "the", ".", *COLOURS, *FORMS, "top", "bottom", "left", "right")
Said = tuple[int, int, int, int, int]
"""Colour, form and place of one shape; colour and form of another, at the opposite place."""
CAPTIONS: tuple[Said, ...] = tuple(product(range(8), range(4), range(4), range(8), range(4)))


def caption(said: Said) -> list[str]:
    """Return the 16 words: a red disc at the top left and a blue ring at the bottom right ."""
    colour, form, corner, colour2, form2 = said
    first = ["a", COLOURS[colour], FORMS[form], "at", "the", *PLACES[corner]]
    return [*first, "and", "a", COLOURS[colour2], FORMS[form2], "at", "the", *PLACES[3 - corner], "."]


def mask(form: int, size: int, x: float, y: float) -> Tensor:
    """Return the pixels [size, size] of a form with its middle at (x, y)."""
    rows, columns = torch.meshgrid(torch.arange(size) + 0.5 - y, torch.arange(size) + 0.5 - x, indexing="ij")
    radius, across, down = size / 5, columns.abs(), rows.abs()
    distance = (columns**2 + rows**2).sqrt()
    forms = (
        distance < radius,
        torch.maximum(across, down) < 0.9 * radius,
        (torch.minimum(across, down) < 0.3 * radius) & (torch.maximum(across, down) < radius),
        (distance < radius) & (distance > 0.5 * radius),
    )
    return forms[form]


@dataclass(frozen=True)
class ShapeSamples:
    """A split: sample i is the same on every rank and in every layout. `size`: pixels of a side; `seed`: the run's."""

    size: int
    seed: int
    split: str

    def __len__(self) -> int:
        return 100 * len(CAPTIONS)

    def samples(self, first: int, count: int) -> Batch:
        """Draw samples first ... first + count - 1."""
        epochs, places = np.divmod(np.arange(first, first + count), len(CAPTIONS))
        said = [CAPTIONS[self.order(epoch)(places[i : i + 1])[0]] for i, epoch in enumerate(epochs.tolist())]
        images = [self.draw(each, index) for index, each in enumerate(said, first)]
        words = [[WORDS.index(word) for word in caption(each)] for each in said]
        labels = torch.zeros(count, 1, dtype=torch.int64)
        return {"images": torch.stack(images), "words": torch.tensor(words), "labels": labels}

    held_out = samples

    def order(self, epoch: int) -> Permutation:
        """Return the order of captions in an epoch."""
        return Permutation(len(CAPTIONS), seed_of(f"{self.seed}/{self.split}"), epoch)

    def draw(self, said: Said, index: int) -> Tensor:
        """Draw two forms near the middles of opposite quarters, on noise: [3, size, size] uint8."""
        colour, form, corner, colour2, form2 = said
        generator = torch.Generator().manual_seed(seed_of(f"{self.seed}/{self.split}/{index}"))
        light = 40 * torch.rand(3, self.size, self.size, generator=generator)
        for tint, shape, where in ((colour, form, corner), (colour2, form2, 3 - corner)):
            shift = (torch.rand(2, generator=generator) - 0.5) * self.size / 8
            x = (0.28 + 0.44 * (where % 2)) * self.size + float(shift[0])
            y = (0.28 + 0.44 * (where // 2)) * self.size + float(shift[1])
            light += 215 * torch.tensor(LIGHT[tint])[:, None, None] * mask(shape, self.size, x, y)
        return light.clamp(max=255).to(torch.uint8)


def open_shapes(data: Shapes, config: Config, folder: object) -> Opened:
    """Open the splits, which are drawn on reading."""
    assert isinstance(config.model, TwoTowers), config.model
    size = config.model.image
    held_out = ShapeSamples(size, config.seed, "validation") if config.validation.every else None
    return Opened(ShapeSamples(size, config.seed, "train"), held_out, tokenizer=None)
