"""The families of models: how one is made, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.config import Config
from meshwright.model import Costs, Stretch
from meshwright.models import bert, encoder_decoder, gpt, resnext, t5, transformer, vit
from meshwright.models.bert import BERT
from meshwright.models.chain import Chain
from meshwright.models.gpt import GPT
from meshwright.models.resnext import ResNeXtModel
from meshwright.models.t5 import T5Model
from meshwright.models.transformer import Transformer
from meshwright.models.vit import ViT
from meshwright.tensor.kit import Kit


@dataclass(frozen=True)
class Family:
    """A family of models: how one, or a stretch of one, is made of a config and a kit."""

    model: Callable[[Any, Kit, Stretch | None], Chain]
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
    "gpt2": Family(GPT, gpt.products, lambda c: c.data.lengths.source, gpt.sample_shapes),
    "bert": Family(BERT, bert.products, lambda c: c.data.lengths.source, bert.sample_shapes),
    "transformer": Family(
        Transformer, transformer.products, encoder_decoder.tokens_per_sample, encoder_decoder.sample_shapes
    ),
    "t5": Family(T5Model, t5.products, encoder_decoder.tokens_per_sample, encoder_decoder.sample_shapes),
    "vit": Family(ViT, vit.products, vit.tokens_per_sample, vit.sample_shapes),
    "resnext": Family(ResNeXtModel, resnext.products, resnext.tokens_per_sample, resnext.sample_shapes),
}


def family_of(config: Config) -> Family:
    """The family of a run's model."""
    return FAMILIES[config.model.family]
