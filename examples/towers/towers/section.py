"""The section of the model. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.section import Transformer, heads_divide_hidden
from meshwright.config.section import Positive, Rule, Share, divisors, listed, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


@rule("model.image", "model.patch")
def patches_divide_image(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, TwoTowers), model
    if model.image % model.patch:
        valid = listed(divisors(model.image))
        yield Problem("model.patch", model.patch, f"does not divide model.image={model.image}", valid)


@rule("model.words", "data.kind")
def captions_fit(config: Config) -> Iterator[Problem]:
    model, words = config.model, config.data.lengths.source
    assert isinstance(model, TwoTowers), model
    if words > model.words:
        rule_text = f"is fewer than the {words} words of a caption of data.kind={config.data.kind}"
        yield Problem("model.words", model.words, rule_text, f"{words} or more")


@rule("layout.tensor", "model.family")
def rows_are_contrasted_whole(config: Config) -> Iterator[Problem]:
    tensor = config.layout.tensor
    if tensor.batch_axes and tensor.kind != "towers":
        rule_text = "cuts a batch's rows over ranks, and every sample of the batch is contrasted with all others"
        yield Problem("layout.tensor.kind", tensor.kind, rule_text, "none, megatron, towers")


@rule("bits.kind", "model.family")
def portions_are_not_contrasted(config: Config) -> Iterator[Problem]:
    if config.bits.layout_free:
        rule_text = "computes a batch in portions, and every sample of the batch is contrasted with all others"
        yield Problem("bits.kind", "layout-free", rule_text, "usual")


class TwoTowers(Transformer):
    """An image encoder (ViT) and a text decoder (GPT-2) of equal sizes, trained as CLIP (arXiv 2103.00020)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        heads_divide_hidden,
        patches_divide_image,
        captions_fit,
        rows_are_contrasted_whole,
        portions_are_not_contrasted,
    )
    chain: ClassVar[str] = "towers.model:TwoTowersModel"
    reads: ClassVar[str] = "captioned images"
    data_kind: ClassVar[str] = "shapes"
    table_fields: ClassVar[tuple[str, ...]] = ("vocabulary",)

    family: Literal["towers"]
    embedding: Positive = 64
    """E: the width of the vectors that images and texts are compared by."""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """The divisor of cosines before the softmax. The last norms' weights learn the rest."""
    image: Positive = 16
    """Pixels of an image's side."""
    channels: Positive = 3
    """Colours of a pixel."""
    patch: Positive = 4
    """Pixels of a patch's side, which divide image."""
    words: Positive = 16
    """The most words of a caption."""
    vocabulary: Positive = 64
    """Words that the model knows."""
    dropout: Share = 0.0

    @property
    def positions(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1
