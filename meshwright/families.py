"""The families of models: how one is made, what feeds it, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.config import Config
from meshwright.config.data_rules import objective_of
from meshwright.data.dataset import Dataset
from meshwright.data.images import IMAGES
from meshwright.data.masked import MASKED
from meshwright.data.pairs_samples import PAIRS
from meshwright.data.sampler import TEXT
from meshwright.data.spans import SPANS
from meshwright.model import Costs, Stretch
from meshwright.models import bert, encoder_decoder, gpt, resnext, t5, transformer, vit
from meshwright.models.bert import BERT
from meshwright.models.chain import Chain
from meshwright.models.gpt import GPT
from meshwright.models.resnext import ResNeXtModel
from meshwright.models.section import EncoderDecoder
from meshwright.models.t5 import T5Model
from meshwright.models.transformer import Transformer
from meshwright.models.vit import ViT
from meshwright.tensor.kit import Kit


@dataclass(frozen=True)
class Family:
    """A family of models: how one, or a stretch of one, is made of a config and a kit, and what feeds it."""

    model: Callable[[Any, Kit, Stretch | None], Chain]
    data: str
    """The kind of data that it reads (DATA); of an encoder-decoder its objective decides."""
    products: Callable[[Config], Costs]
    """Multiplications of a sample's forward pass."""
    tokens_per_sample: Callable[[Config], int]
    shapes: Callable[[Config], dict[str, tuple[int, ...]]]
    """Of one sample, by its entries' names."""

    def flops_per_sample(self, config: Config) -> int:
        """Floating-point operations of a sample's forward and backward pass: matrix products only, no recomputation.

        6 a weight and token (PaLM, arXiv 2204.02311, appendix B).
        """
        return int(6 * self.products(config).total)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(GPT, "text", gpt.products, lambda c: c.data.sequence, gpt.sample_shapes),
    "bert": Family(BERT, "masked", bert.products, lambda c: c.data.sequence, bert.sample_shapes),
    "transformer": Family(
        Transformer, "pairs", transformer.products, encoder_decoder.tokens_per_sample, encoder_decoder.sample_shapes
    ),
    "t5": Family(T5Model, "pairs", t5.products, encoder_decoder.tokens_per_sample, encoder_decoder.sample_shapes),
    "vit": Family(ViT, "images", vit.products, vit.tokens_per_sample, vit.sample_shapes),
    "resnext": Family(ResNeXtModel, "images", resnext.products, resnext.tokens_per_sample, resnext.sample_shapes),
}


def family_of(config: Config) -> Family:
    """The family of a run's model."""
    return FAMILIES[config.model.family]


DATA: dict[str, Dataset] = {"text": TEXT, "masked": MASKED, "pairs": PAIRS, "spans": SPANS, "images": IMAGES}


def dataset_of(config: Config) -> Dataset:
    """The data set that feeds a run."""
    kind = objective_of(config) if isinstance(config.model, EncoderDecoder) else family_of(config).data
    return DATA[kind]
