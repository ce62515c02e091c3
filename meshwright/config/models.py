"""The config's models: a section a family."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from meshwright.section import Layers, Positive, Section, Share


class Network(Section):
    """What all models have. Letters as in the glossary: H hidden, V vocabulary."""

    hidden: Positive = 768
    dropout: Share = 0.1
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    vocabulary_multiple: Positive = 64
    """The rows of the token table (of a classifier: the classes) are padded to a multiple of this; the padding is
    masked out of the softmax."""

    def padded(self, rows: int) -> int:
        """`rows` up to the next multiple of vocabulary_multiple."""
        return math.ceil(rows / self.vocabulary_multiple) * self.vocabulary_multiple


class Transformer(Network):
    """Layers of attention and feed-forward: L layers, A heads."""

    layers: Layers = 12
    heads: Positive = 12

    @property
    def num_blocks(self) -> int:
        """Links of the chain that a pipeline cuts."""
        return self.layers

    @property
    def branches(self) -> tuple[str, int]:
        """The field that counts a block's branches, and their number: what tensor parallelism deals out."""
        return "model.heads", self.heads

    @property
    def inner(self) -> int:
        """N: the width of the feed-forward layer."""
        return 4 * self.hidden


class TextTransformer(Transformer):
    """A Transformer over tokens."""

    positions: Positive = 1024
    vocabulary: Positive = 50257

    @property
    def padded_vocabulary(self) -> int:
        return self.padded(self.vocabulary)


class Gpt2(TextTransformer):
    """A GPT-2 style decoder."""

    family: Literal["gpt2"] = "gpt2"
    tied: bool = True


class Bert(TextTransformer):
    """BERT: masked language model and, with `next_sentence`, next-sentence prediction."""

    family: Literal["bert"]
    positions: Positive = 512
    vocabulary: Positive = 30522
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    norm_order: Literal["original", "megatron"] = "original"
    """original: a norm after each residual sum; megatron: at the input of each sub-layer, and one at the end."""
    next_sentence: bool = True


class EncoderDecoder(TextTransformer):
    """Sequence to sequence: `layers` blocks that read the source, then as many that write the target."""

    positions: Positive = 512
    feed_forward: Positive = 2048
    label_smoothing: Share = 0.0
    """The share of the target that all classes have in equal parts (Szegedy et al., arXiv 1512.00567, section 7)."""

    @property
    def num_blocks(self) -> int:
        return 2 * self.layers

    @property
    def inner(self) -> int:
        return self.feed_forward


class Attentional(EncoderDecoder):
    """The original Transformer (Vaswani et al., 2017): one table for source, target and output."""

    family: Literal["transformer"]
    layers: Layers = 6
    hidden: Positive = 512
    heads: Positive = 8
    vocabulary: Positive = 37000
    label_smoothing: Share = 0.1


class T5(EncoderDecoder):
    """T5 (Raffel et al., 2020): norms without a mean, linears without biases, positions as a bias on attention."""

    family: Literal["t5"]
    layers: Layers = 6
    hidden: Positive = 512
    heads: Positive = 8
    head_width: Positive = 64
    vocabulary: Positive = 32128
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-6
    distance_buckets: Positive = 32
    """Distances between two tokens that attention tells apart: half of them exactly, the others in powers."""
    distance_max: Positive = 128
    """From here on all distances are in the last bucket."""


class ImageNetwork(Network):
    """A classifier of square images."""

    image: Positive = 224
    channels: Positive = 3
    classes: Positive = 1000


class ResNeXt(ImageNetwork):
    """ResNeXt (Xie et al., 2017): bottleneck blocks of `paths` parallel ones, in stages that halve the image.

    Norms have a group of channels for each path. Dropout is in front of the classifier.
    """

    family: Literal["resnext"]
    hidden: Positive = 64
    """Channels behind the stem."""
    stage_blocks: tuple[Layers, ...] = (3, 4, 6, 3)
    paths: Positive = 32
    path_width: Positive = 4
    """Channels of a path in the first stage; they double from stage to stage."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: a 7 x 7 convolution with stride 2, then max pooling with stride 2; small: 3 x 3 with stride 1."""
    dropout: Share = 0.0

    @property
    def num_blocks(self) -> int:
        return sum(self.stage_blocks)

    @property
    def branches(self) -> tuple[str, int]:
        return "model.paths", self.paths


class Vit(Transformer, ImageNetwork):
    """A Vision Transformer: square images in square patches, a class token, a linear classifier."""

    family: Literal["vit"]
    patch: Positive = 16
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    dropout: Share = 0.0

    @property
    def positions(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


def _family(model: object) -> object:
    """The tag of a model's section, gpt2 where it names none."""
    if isinstance(model, dict):
        return model.get("family", "gpt2")
    return model.family if isinstance(model, Gpt2 | Bert | Attentional | T5 | Vit | ResNeXt) else None


Model = Annotated[
    Annotated[Gpt2, Tag("gpt2")]
    | Annotated[Bert, Tag("bert")]
    | Annotated[Attentional, Tag("transformer")]
    | Annotated[T5, Tag("t5")]
    | Annotated[Vit, Tag("vit")]
    | Annotated[ResNeXt, Tag("resnext")],
    Discriminator(_family),
]
