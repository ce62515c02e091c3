"""Hugging Face's BERT: BertForPreTraining and BertForMaskedLM; with norm_order megatron, their MegatronBert twins.

Their linears are [out, in], ours [in, out]. L stands for bert.encoder.layer.N, E for bert.embeddings.

| Hugging Face                         | MegatronBert    | ours                                |
|--------------------------------------|-----------------|-------------------------------------|
| E.word_embeddings                    |                 | tokens, padded                      |
| E.position_embeddings                |                 | positions                           |
| E.token_type_embeddings              |                 | segments, padded                    |
| E.LayerNorm                          | bert.encoder.ln | norm                                |
| L.attention.self.query, key, value   |                 | blocks.N.attention.query_key_value  |
| L.attention.output.dense             |                 | blocks.N.attention.output           |
| L.attention.output.LayerNorm         | L.attention.ln  | blocks.N.attention_norm             |
| L.intermediate.dense                 |                 | blocks.N.feed_forward.expand        |
| L.output.dense                       |                 | blocks.N.feed_forward.contract      |
| L.output.LayerNorm                   | L.ln            | blocks.N.feed_forward_norm          |
| cls.predictions.transform.dense      |                 | transform                           |
| cls.predictions.transform.LayerNorm  |                 | transform_norm                      |
| cls.predictions.bias                 |                 | head.bias, padded                   |
| bert.pooler.dense                    |                 | pooler (next_sentence)              |
| cls.seq_relationship                 |                 | next_sentence_head, padded          |

The first published folders call a LayerNorm's weight and bias gamma and beta.
"""

from __future__ import annotations

import re
from collections.abc import Set

from meshwright.data.specials import FIRST, MASK, PADDING, SEPARATOR, specials_of, with_specials
from meshwright.data.tokenizer import parse_tokenizer
from meshwright.models.bert import BERT as Model
from meshwright.models.bert import NUM_ANSWERS, NUM_SEGMENTS
from meshwright.models.section import Bert
from meshwright.tools.convert.family import Family, Pair, Shape, alike, grouped, shapes_of, transposed
from meshwright.tools.convert.settings import Settings, as_text

_MODEL_TYPES = {"original": "bert", "megatron": "megatron-bert"}
_CLASSES = {"original": "Bert", "megatron": "MegatronBert"}
_TABLE, _HEAD = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"
_ANSWERS = "cls.seq_relationship.weight"

_OUTSIDE = {
    "tokens": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "segments": "bert.embeddings.token_type_embeddings",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
    "pooler": "bert.pooler.dense",
    "next_sentence_head": "cls.seq_relationship",
}
_IN_BLOCK = {
    "attention.output": "attention.output.dense",
    "feed_forward.expand": "intermediate.dense",
    "feed_forward.contract": "output.dense",
}
_NORM = {"original": "bert.embeddings.LayerNorm", "megatron": "bert.encoder.ln"}
_NORMS_IN_BLOCK = {
    "original": {"attention_norm": "attention.output.LayerNorm", "feed_forward_norm": "output.LayerNorm"},
    "megatron": {"attention_norm": "attention.ln", "feed_forward_norm": "ln"},
}

_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "positions": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "norm_epsilon": "layer_norm_eps",
}

# What changes the mathematics: the value that ours has, which is also what a missing key means.
_FIXED = {
    "hidden_act": "gelu",
    "type_vocab_size": NUM_SEGMENTS,
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}


def _read(settings: Settings, stored: Set[str]) -> Bert:
    settings.require(*(key for field, key in _NAMES.items() if field not in ("inner", "norm_epsilon")))
    for key, ours in _FIXED.items():
        settings.only(key, ours)
    kind = settings.get("model_type", "bert")
    return settings.model(
        Bert,
        _NAMES,
        family="bert",
        norm_order=next(order for order, theirs in _MODEL_TYPES.items() if theirs == kind),
        next_sentence=_ANSWERS in stored,
        dropout=settings.one_number(_DROPOUTS, 0.1),
    )


def _files(model: Bert, tokenizer: str | None, dtype: str) -> dict[str, str]:
    task = "ForPreTraining" if model.next_sentence else "ForMaskedLM"
    fields = model.model_dump()
    settings = {key: fields[field] for field, key in _NAMES.items() if field != "inner"} | {
        "architectures": [_CLASSES[model.norm_order] + task],
        "model_type": _MODEL_TYPES[model.norm_order],
        "intermediate_size": model.inner,
        **dict.fromkeys(_DROPOUTS, model.dropout),
        **_FIXED,
        "initializer_range": 0.02,
        "torch_dtype": dtype,
    }
    if tokenizer is None:
        return {"config.json": as_text(settings)}
    specials = specials_of(parse_tokenizer(tokenizer, "the checkpoint's tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.positions,
        "pad_token": PADDING,
        "cls_token": FIRST,
        "sep_token": SEPARATOR,
        "mask_token": MASK,
    }
    return {
        "config.json": as_text(settings | {"pad_token_id": specials.padding}),
        "tokenizer.json": with_specials(tokenizer, specials),
        "tokenizer_config.json": as_text(about),
    }


def _pairs(model: Bert) -> list[Pair]:
    return [_pair(name, shape, model) for name, shape in shapes_of(Model, model).items()]


def _pair(name: str, shape: Shape, model: Bert) -> Pair:
    layer, _, kind = name.rpartition(".")
    rows = {
        "tokens": model.vocabulary,
        "head": model.vocabulary,
        "segments": NUM_SEGMENTS,
        "next_sentence_head": NUM_ANSWERS,
    }
    if layer in rows:
        return alike(name, shape, f"{_OUTSIDE[layer]}.{kind}", (rows[layer], *shape[1:]))
    if layer.endswith("query_key_value"):
        attention = f"bert.encoder.layer.{layer.split('.')[1]}.attention.self"
        return grouped(name, shape, [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")])
    theirs = f"{_their_layer(layer, model)}.{kind}"
    is_linear = len(shape) == 2 and layer != "positions"
    return transposed(name, shape, theirs) if is_linear else alike(name, shape, theirs)


def _their_layer(layer: str, model: Bert) -> str:
    if layer == "norm":
        return _NORM[model.norm_order]
    if layer in _OUTSIDE:
        return _OUTSIDE[layer]
    blocks, index, inside = layer.split(".", 2)
    assert blocks == "blocks", f"{layer} has no counterpart in Hugging Face's BERT"
    return f"bert.encoder.layer.{index}.{(_IN_BLOCK | _NORMS_IN_BLOCK[model.norm_order])[inside]}"


def _full_name(stored: str) -> str:
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", stored))


BERT = Family(
    title="BERT",
    model_types=tuple(_MODEL_TYPES.values()),
    read=_read,
    pairs=_pairs,
    files=_files,
    full_name=_full_name,
    copies=lambda model: {f"{_HEAD}.weight": _TABLE, f"{_HEAD}.bias": "cls.predictions.bias"},
    passed_over=re.compile(r"bert\.embeddings\.position_ids"),
)
