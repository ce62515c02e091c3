"""Hugging Face's T5: T5ForConditionalGeneration of the first version, with ReLU and one table for all.

Their linears are [out, in], ours [in, out]. E stands for encoder.block.N, D for decoder.block.N, L for model.layers.

| Hugging Face                                  | shape           | ours                               | shape         |
|-----------------------------------------------|-----------------|------------------------------------|---------------|
| shared                                        | [V, H]          | tokens                             | [padded V, H] |
| E.layer.0.layer_norm                          | [H]             | blocks.N.attention_norm            | [H]           |
| E.layer.0.SelfAttention.q, k, v               | [A·E, H] each   | blocks.N.attention.query_key_value | [H, 3, A·E]   |
| E.layer.0.SelfAttention.o                     | [H, A·E]        | blocks.N.attention.output          | [A·E, H]      |
| E.layer.1.layer_norm                          | [H]             | blocks.N.feed_forward_norm         | [H]           |
| E.layer.1.DenseReluDense.wi                   | [F, H]          | blocks.N.feed_forward.expand       | [H, F]        |
| E.layer.1.DenseReluDense.wo                   | [H, F]          | blocks.N.feed_forward.contract     | [F, H]        |
| D.layer.0: as E.layer.0                       |                 | blocks.L+N: the same               |               |
| D.layer.1.layer_norm                          | [H]             | blocks.L+N.cross_norm              | [H]           |
| D.layer.1.EncDecAttention.q                   | [A·E, H]        | blocks.L+N.cross.query             | [H, A·E]      |
| D.layer.1.EncDecAttention.k, v                | [A·E, H] each   | blocks.L+N.cross.key_value         | [H, 2, A·E]   |
| D.layer.1.EncDecAttention.o                   | [H, A·E]        | blocks.L+N.cross.output            | [A·E, H]      |
| D.layer.2: as E.layer.1                       |                 | blocks.L+N: the same               |               |
| S.block.0.layer.0....relative_attention_bias  | [buckets, A]    | S_distances (S encoder, decoder)   | [buckets, A]  |
| encoder.final_layer_norm                      | [H]             | blocks.L-1.final_norm              | [H]           |
| decoder.final_layer_norm                      | [H]             | norm                               | [H]           |
"""

from __future__ import annotations

import re
from collections.abc import Set

import tokenizers

from meshwright.data.specials import SEQUENCE_PADDING, specials_with_room, with_t5_specials
from meshwright.data.tokenizer import parse_tokenizer
from meshwright.models.section import T5
from meshwright.models.t5 import T5Model
from meshwright.tools.convert.family import Family, Pair, Shape, alike, grouped, shapes_of, transposed
from meshwright.tools.convert.settings import Settings, as_text

_TABLE = "shared.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
_DISTANCES = "block.0.layer.0.SelfAttention.relative_attention_bias"

_OUTSIDE = {
    "tokens": "shared",
    "encoder_distances": f"encoder.{_DISTANCES}",
    "decoder_distances": f"decoder.{_DISTANCES}",
    "norm": "decoder.final_layer_norm",
}
# The sub-layers of a block, in their order; ours by the first word of a name in it.
_SUB_LAYERS = {"encoder": ("attention", "feed_forward"), "decoder": ("attention", "cross", "feed_forward")}
_IN_SUB_LAYER = {
    "attention.query_key_value": ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v"),
    "attention.output": ("SelfAttention.o",),
    "cross.query": ("EncDecAttention.q",),
    "cross.key_value": ("EncDecAttention.k", "EncDecAttention.v"),
    "cross.output": ("EncDecAttention.o",),
    "feed_forward.expand": ("DenseReluDense.wi",),
    "feed_forward.contract": ("DenseReluDense.wo",),
}

_NAMES = {
    "layers": "num_layers",
    "hidden": "d_model",
    "heads": "num_heads",
    "head_width": "d_kv",
    "feed_forward": "d_ff",
    "positions": "n_positions",
    "vocabulary": "vocab_size",
    "norm_epsilon": "layer_norm_epsilon",
    "dropout": "dropout_rate",
    "distance_buckets": "relative_attention_num_buckets",
    "distance_max": "relative_attention_max_distance",
}

# What changes the mathematics: the value that ours has, which is also what a missing key means.
_FIXED = {"tie_word_embeddings": True, "scale_decoder_outputs": True, "is_encoder_decoder": True}
_FIRST_VERSION = "relu"


def _read(settings: Settings, stored: Set[str]) -> T5:
    settings.require("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    activation = settings.get("feed_forward_proj", _FIRST_VERSION)
    if activation != _FIRST_VERSION:
        kind = "T5 1.1 and its kin (mT5, Flan-T5) have gated feed-forwards, and ours is T5 1.0"
        raise settings.refused(f"feed_forward_proj={activation} is not supported: {kind}; valid: {_FIRST_VERSION}")
    for key, ours in _FIXED.items():
        settings.only(key, ours)
    layers = settings.get("num_layers", None)
    if settings.get("num_decoder_layers", None) not in (None, layers):
        decoders = settings.get("num_decoder_layers", None)
        raise settings.refused(
            f"num_decoder_layers={decoders} is not num_layers={layers}: ours has one number for both"
        )
    return settings.section(T5, _NAMES, family="t5")


def _pairs(model: T5) -> list[Pair]:
    return [_pair(name, shape, model) for name, shape in shapes_of(T5Model, model).items()]


def _pair(name: str, shape: Shape, model: T5) -> Pair:
    layer = name.removesuffix(".weight")
    if layer == "tokens":
        return alike(name, shape, _TABLE, (model.vocabulary, shape[1]))
    if layer in _OUTSIDE:
        return alike(name, shape, f"{_OUTSIDE[layer]}.weight")
    blocks, number, inside = layer.split(".", 2)
    assert blocks == "blocks", f"{name} has no counterpart in Hugging Face's T5"
    half, index = ("decoder" if int(number) >= model.layers else "encoder"), int(number) % model.layers
    if inside == "final_norm":
        return alike(name, shape, f"{half}.final_layer_norm.weight")
    sub_layer = inside.removesuffix("_norm").split(".")[0]
    place = f"{half}.block.{index}.layer.{_SUB_LAYERS[half].index(sub_layer)}"
    if inside.endswith("_norm"):
        return alike(name, shape, f"{place}.layer_norm.weight")
    theirs = [f"{place}.{linear}.weight" for linear in _IN_SUB_LAYER[inside]]
    return transposed(name, shape, theirs[0]) if len(theirs) == 1 else grouped(name, shape, theirs)


def _files(model: T5, tokenizer: str | None, dtype: str) -> dict[str, str]:
    fields = model.model_dump()
    settings = {key: fields[field] for field, key in _NAMES.items()} | {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "num_decoder_layers": model.layers,
        "feed_forward_proj": _FIRST_VERSION,
        **_FIXED,
        "initializer_factor": 1.0,
        "torch_dtype": dtype,
    }
    if tokenizer is None:
        return {"config.json": as_text(settings)}
    specials = specials_with_room(model, parse_tokenizer(tokenizer, "the checkpoint's tokenizer.json"))
    ids = {"pad_token_id": specials.padding, "decoder_start_token_id": specials.start, "eos_token_id": specials.end}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.positions,
        "pad_token": SEQUENCE_PADDING,
        "eos_token": tokenizers.Tokenizer.from_str(tokenizer).id_to_token(specials.end),
    }
    return {
        "config.json": as_text(settings | ids),
        "tokenizer.json": with_t5_specials(tokenizer, specials),
        "tokenizer_config.json": as_text(about),
    }


T5_FAMILY = Family(
    title="T5",
    model_types=("t5",),
    read=_read,
    pairs=_pairs,
    files=_files,
    full_name=lambda stored: stored,
    copies=lambda model: dict.fromkeys(_COPIES, _TABLE),
    # Stored by old versions, and read by none: the decoder's attention to the source has no distances.
    passed_over=re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
)
