"""The config's models: a section a family."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from meshwright.config.section import Positive, Section, Share


class Transformer(Section):
    """What all models have. Letters as in the glossary: L layers, H hidden, A heads, V vocabulary."""

    layers: Positive = 12
    hidden: Positive = 768
    heads: Positive = 12
    dropout: Share = 0.1
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    vocabulary_multiple: Positive = 64
    """The rows of the token table (of a classifier: the classes) are padded to a multiple of this; the padding is
    masked out of the softmax."""

    @property
    def inner(self) -> int:
        """N: the width of the feed-forward layer."""
        return 4 * self.hidden

    def padded(self, rows: int) -> int:
        """`rows` up to the next multiple of vocabulary_multiple."""
        return math.ceil(rows / self.vocabulary_multiple) * self.vocabulary_multiple


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


class Vit(Transformer):
    """A Vision Transformer: square images in square patches, a class token, a linear classifier."""

    family: Literal["vit"]
    image: Positive = 224
    patch: Positive = 16
    channels: Positive = 3
    classes: Positive = 1000
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
    return model.family if isinstance(model, Gpt2 | Bert | Vit) else None


Model = Annotated[
    Annotated[Gpt2, Tag("gpt2")] | Annotated[Bert, Tag("bert")] | Annotated[Vit, Tag("vit")], Discriminator(_family)
]
