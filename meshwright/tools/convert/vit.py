"""Hugging Face's ViT: ViTForImageClassification.

Their linears are [out, in], ours [in, out]. L stands for vit.encoder.layer.N, E for vit.embeddings.

| Hugging Face                          | shape        | ours                               | shape           |
|---------------------------------------|--------------|------------------------------------|-----------------|
| E.patch_embeddings.projection.weight  | [H, C, P, P] | patches, all rows but the last     | [C·P·P + 1, H]  |
| E.patch_embeddings.projection.bias    | [H]          | patches, the last row              |                 |
| E.cls_token                           | [1, 1, H]    | positions, added to row 0          | [padded T, H]   |
| E.position_embeddings                 | [1, T, H]    | positions                          |                 |
| L.layernorm_before                    | [H]          | blocks.N.attention_norm            | [H]             |
| L.attention.attention.query, key, value | [H, H] each | blocks.N.attention.query_key_value | [H, 3, H]      |
| L.attention.output.dense              | [H, H]       | blocks.N.attention.output          | [H, H]          |
| L.layernorm_after                     | [H]          | blocks.N.feed_forward_norm         | [H]             |
| L.intermediate.dense                  | [4H, H]      | blocks.N.feed_forward.expand       | [H, 4H]         |
| L.output.dense                        | [H, 4H]      | blocks.N.feed_forward.contract     | [4H, H]         |
| vit.layernorm                         | [H]          | norm                               | [H]             |
| classifier                            | [classes, H] | head                               | [padded, H]     |

Theirs adds the class token to its position; ours has the sum alone, and gives it back as the class token, beside a
position of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from meshwright.models.section import Vit
from meshwright.models.vit import ViT
from meshwright.tools.convert.family import Family, Pair, Shape, alike, grouped, shapes_of, transposed
from meshwright.tools.convert.settings import Settings, as_text

_EMBEDDINGS = "vit.embeddings"
_PROJECTION = f"{_EMBEDDINGS}.patch_embeddings.projection"
_PROCESSOR = "preprocessor_config.json"

_OUTSIDE = {"norm": "vit.layernorm", "head": "classifier"}
_IN_BLOCK = {
    "attention_norm": "layernorm_before",
    "attention.output": "attention.output.dense",
    "feed_forward_norm": "layernorm_after",
    "feed_forward.expand": "intermediate.dense",
    "feed_forward.contract": "output.dense",
}

_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "image": "image_size",
    "patch": "patch_size",
    "channels": "num_channels",
    "norm_epsilon": "layer_norm_eps",
}

# What changes the mathematics: the value that ours has, which is also what a missing key means.
_FIXED = {"hidden_act": "gelu", "qkv_bias": True}


def _read(settings: Settings, stored: Set[str]) -> Vit:
    settings.require("num_hidden_layers", "hidden_size", "num_attention_heads", "image_size", "patch_size")
    for key, ours in _FIXED.items():
        settings.only(key, ours)
    labels = settings.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # a missing one means two
    if not isinstance(labels, dict):
        raise settings.refused(f"id2label={labels} names no classes")
    dropout = settings.one_number(_DROPOUTS, 0.0)
    model = settings.model(Vit, _NAMES, family="vit", classes=len(labels), dropout=dropout)
    if model.image % model.patch:
        raise settings.refused(f"patch_size={model.patch} does not divide image_size={model.image}")
    beside = settings.path.parent / _PROCESSOR
    if beside.is_file():  # another scale of the pixels would be another function of the image
        for key in ("image_mean", "image_std"):
            Settings(beside).only(key, [0.5] * model.channels)
    return model


def _files(model: Vit, tokenizer: str | None, dtype: str) -> dict[str, str]:
    names = [f"LABEL_{number}" for number in range(model.classes)]
    fields = model.model_dump()
    settings = {key: fields[field] for field, key in _NAMES.items() if field != "inner"} | {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "intermediate_size": model.inner,
        **dict.fromkeys(_DROPOUTS, model.dropout),
        **_FIXED,
        "initializer_range": 0.02,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "torch_dtype": dtype,
    }
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
    return {"config.json": as_text(settings), _PROCESSOR: as_text(processor)}


def _pairs(model: Vit) -> list[Pair]:
    return [_pair(name, shape, model) for name, shape in shapes_of(ViT, model).items()]


def _pair(name: str, shape: Shape, model: Vit) -> Pair:
    layer, _, kind = name.rpartition(".")
    if layer == "patches":
        return _patches(name, shape, model)
    if layer == "positions":
        return _positions(name, shape, model)
    if layer == "head":
        return alike(name, shape, f"{_OUTSIDE[layer]}.{kind}", (model.classes, *shape[1:]))
    if layer in _OUTSIDE:
        return alike(name, shape, f"{_OUTSIDE[layer]}.{kind}")
    blocks, index, inside = layer.split(".", 2)
    assert blocks == "blocks", f"{layer} has no counterpart in Hugging Face's ViT"
    block = f"vit.encoder.layer.{index}"
    if inside == "attention.query_key_value":
        attention = f"{block}.attention.attention"
        return grouped(name, shape, [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")])
    theirs = f"{block}.{_IN_BLOCK[inside]}.{kind}"
    return transposed(name, shape, theirs) if len(shape) == 2 else alike(name, shape, theirs)


def _patches(name: str, shape: Shape, model: Vit) -> Pair:
    """Theirs: a convolution's weight and bias."""

    def to_ours(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([weight.flatten(1).t(), bias.unsqueeze(0)])

    def to_theirs(whole: Tensor) -> Sequence[Tensor]:
        return [whole[:-1].t(), whole[-1]]

    convolution = (model.hidden, model.channels, model.patch, model.patch)
    theirs = {f"{_PROJECTION}.weight": convolution, f"{_PROJECTION}.bias": (model.hidden,)}
    return Pair(name, shape, theirs, to_ours, to_theirs)


def _positions(name: str, shape: Shape, model: Vit) -> Pair:
    """Theirs: the class token, and the positions."""

    def to_ours(token: Tensor, positions: Tensor) -> Tensor:
        return torch.cat([token[0] + positions[0, :1], positions[0, 1:]])

    def to_theirs(table: Tensor) -> Sequence[Tensor]:
        return [table[0], torch.cat([torch.zeros_like(table[:1]), table[1:]])]

    theirs = {
        f"{_EMBEDDINGS}.cls_token": (1, 1, model.hidden),
        f"{_EMBEDDINGS}.position_embeddings": (1, model.positions, model.hidden),
    }
    return Pair(name, shape, theirs, to_ours, to_theirs, shape[0] - model.positions)


VIT = Family(
    title="ViT",
    model_types=("vit",),
    read=_read,
    pairs=_pairs,
    files=_files,
    full_name=lambda stored: stored,
    copies=lambda model: {},
    passed_over=re.compile(r"(?!)"),
    reads_text=False,
)
