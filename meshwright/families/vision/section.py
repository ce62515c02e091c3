"""The model sections of classifiers of images: ResNeXt and ViT. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.section import Branches, Length, Network, Transformer, heads_divide_hidden
from meshwright.config.section import Layers, Positive, Rule, Share, divisors, listed, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


@rule("model.channels")
def channels_are_grey_or_colours(config: Config) -> Iterator[Problem]:
    model = config.model
    if isinstance(model, ImageNetwork) and model.channels not in (1, 3):
        yield Problem("model.channels", model.channels, "is neither grey nor red, green and blue", "1, 3")


class ImageNetwork(Network):
    """A classifier of square images."""

    reads: ClassVar[str] = "images"
    data_kind: ClassVar[str] = "images"
    rules: ClassVar[tuple[Rule, ...]] = (channels_are_grey_or_colours,)

    image: Positive = 224
    """Pixels of an image's side."""
    channels: Positive = 3
    """1: grey; 3: red, green and blue."""
    classes: Positive = 1000
    """The number of classes: at least the number of data.source's classes."""


@rule("model.hidden", "model.paths")
def paths_divide_hidden(config: Config) -> Iterator[Problem]:
    paths, hidden = config.model.branches.number, config.model.hidden
    # Every norm has one group for each path of a block, so one rule of divisibility is enough for all kits.
    if hidden % paths:
        rule_text = f"does not divide model.hidden={hidden}: norms have a group for each path"
        yield Problem("model.paths", paths, rule_text, listed(divisors(hidden)))


class ResNeXt(ImageNetwork):
    """ResNeXt (Xie et al., 2017): bottleneck blocks of `paths` parallel ones, in stages that halve the image.

    Norms have a group of channels for each path. Dropout is in front of the classifier.
    """

    rules: ClassVar[tuple[Rule, ...]] = (paths_divide_hidden, channels_are_grey_or_colours)

    family: Literal["resnext"]
    chain: ClassVar[str] = "meshwright.families.vision.resnext:ResNeXtModel"
    uncut_because: ClassVar[str] = "whose norms see all positions"
    not_in_graphs: ClassVar[tuple[str, ...]] = ("group norms",)
    hidden: Positive = 64
    """Channels behind the stem."""
    stage_blocks: tuple[Layers, ...] = (3, 4, 6, 3)
    """Number of blocks of each stage."""
    paths: Positive = 32
    """Parallel paths of a block (its cardinality), which divide hidden."""
    path_width: Positive = 4
    """Channels of a path in the first stage; the number doubles from stage to stage."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: a 7 x 7 convolution with stride 2, then max pooling with stride 2; small: 3 x 3 with stride 1."""
    dropout: Share = 0.0

    @property
    def num_blocks(self) -> int:
        return sum(self.stage_blocks)

    @property
    def branches(self) -> Branches:
        return Branches("model.paths", self.paths)


@rule("model.image", "model.patch")
def patches_divide_image(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Vit), model
    if model.image % model.patch:
        valid = listed(divisors(model.image))
        yield Problem("model.patch", model.patch, f"does not divide model.image={model.image}", valid)


class Vit(Transformer, ImageNetwork):
    """A Vision Transformer: square images in square patches, a class token, a linear classifier."""

    rules: ClassVar[tuple[Rule, ...]] = (heads_divide_hidden, patches_divide_image, channels_are_grey_or_colours)

    family: Literal["vit"]
    chain: ClassVar[str] = "meshwright.families.vision.vit:ViT"
    patch: Positive = 16
    """Pixels of a patch's side, which divide image."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    dropout: Share = 0.0

    @property
    def positions(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1

    def sequences(self, config: Config) -> Iterator[Length]:
        note = " (the patches of model.image and the class token)"
        yield Length("the sequence", self.positions, note, ("model.image", "model.patch"))
