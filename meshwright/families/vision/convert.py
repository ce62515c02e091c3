"""Hugging Face's ViT: ViTForImageClassification.

Hugging Face's linears are [out, in], ours [in, out]. Query, key and value are one linear here.

| Hugging Face                       | shape        | ours                     | shape          |
|------------------------------------|--------------|--------------------------|----------------|
| patch_embeddings.projection.weight | [H, C, P, P] | patches, but its last row | [C·P·P + 1, H] |
| patch_embeddings.projection.bias   | [H]          | patches, the last row    |                |
| cls_token                          | [1, 1, H]    | positions, added to row 0 | [padded T, H] |
| position_embeddings                | [1, T, H]    | positions                |                |
| classifier                         | [classes, H] | head                     | [padded, H]    |

Hugging Face adds the class token to its position. We store only the sum; an export writes the sum as the class token,
and zeros as its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import ClassVar

import torch

from meshwright.families.vision.section import Vit
from meshwright.training.convert.family import Family, Names, TensorPair, TensorShape, as_text
from meshwright.training.convert.folder import Settings

_EMBEDDINGS = "vit.embeddings"
_PROJECTION = f"{_EMBEDDINGS}.patch_embeddings.projection"
_PROCESSOR = "preprocessor_config.json"


class VitFamily(Family):
    """ViTForImageClassification."""

    title, model_types, section = "ViT", ("vit",), Vit
    fields: ClassVar = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "inner": "intermediate_size",
        "image": "image_size",
        "patch": "patch_size",
        "channels": "num_channels",
        "norm_epsilon": "layer_norm_eps",
    }
    required = ("layers", "hidden", "heads", "image", "patch")
    fixed: ClassVar = {"hidden_act": "gelu", "qkv_bias": True}
    dropouts, dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0
    reads_text = False
    outside: ClassVar = {"norm": "vit.layernorm", "head": "classifier"}
    inside: ClassVar = {
        "attention_norm": "layernorm_before",
        "attention.query_key_value": tuple(
            f"attention.attention.{projection}" for projection in ("query", "key", "value")
        ),
        "attention.output": "attention.output.dense",
        "feed_forward_norm": "layernorm_after",
        "feed_forward.expand": "intermediate.dense",
        "feed_forward.contract": "output.dense",
    }
    block = "vit.encoder.layer.N"
    rows: ClassVar = {"head": "classes"}

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        labels = settings.values.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # a missing one means two
        if not isinstance(labels, dict):
            raise settings.refused(f"id2label={labels} names no classes")
        return {"classes": len(labels)}

    def read(self, settings: Settings, stored: Set[str]) -> Vit:
        model = super().read(settings, stored)
        assert isinstance(model, Vit)
        if model.image % model.patch:
            raise settings.refused(f"patch_size={model.patch} does not divide image_size={model.image}")
        beside = settings.path.parent / _PROCESSOR
        if beside.is_file():  # with another scale of pixels the model would compute another function of the image
            for key in ("image_mean", "image_std"):
                Settings(beside).only(key, [0.5] * model.channels)
        return model

    def further_settings(self, model: Vit) -> dict[str, object]:
        return {
            "architectures": ["ViTForImageClassification"],
            "initializer_range": 0.02,
            "id2label": {str(index): f"LABEL_{index}" for index in range(model.classes)},
            "label2id": {f"LABEL_{index}": index for index in range(model.classes)},
        }

    def further_files(self, model: Vit) -> dict[str, str]:
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": model.image, "width": model.image},
            "resample": 2,  # bilinear
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * model.channels,
            "image_std": [0.5] * model.channels,
        }
        return {_PROCESSOR: as_text(processor)}

    def pair(self, name: str, shape: TensorShape, model: Vit, names: Names, rows: Mapping[str, int]) -> TensorPair:
        if name == "patches.weight":
            return _patches(name, shape, model)
        if name == "positions.weight":
            return _positions(name, shape, model)
        return super().pair(name, shape, model, names, rows)


def _patches(name: str, shape: TensorShape, model: Vit) -> TensorPair:
    """Pair our patches with the weight and bias of Hugging Face's convolution."""
    convolution = (model.hidden, model.channels, model.patch, model.patch)
    theirs = {f"{_PROJECTION}.weight": convolution, f"{_PROJECTION}.bias": (model.hidden,)}
    # A convolution with a stride equal to the kernel size is a linear of each patch's pixels.
    return TensorPair(
        name, shape, theirs,
        lambda weight, bias: torch.cat([weight.flatten(1).t(), bias.unsqueeze(0)]),
        lambda whole: [whole[:-1].t(), whole[-1]],
    )  # fmt: skip


def _positions(name: str, shape: TensorShape, model: Vit) -> TensorPair:
    """Pair our positions with Hugging Face's class token and positions."""
    theirs = {
        f"{_EMBEDDINGS}.cls_token": (1, 1, model.hidden),
        f"{_EMBEDDINGS}.position_embeddings": (1, model.positions, model.hidden),
    }
    # Only the sum of class token and position 0 is stored, so an export cannot separate the two.
    return TensorPair(
        name, shape, theirs,
        lambda token, positions: torch.cat([token[0] + positions[0, :1], positions[0, 1:]]),
        lambda table: [table[0], torch.cat([torch.zeros_like(table[:1]), table[1:]])],
        shape[0] - model.positions,
    )  # fmt: skip
