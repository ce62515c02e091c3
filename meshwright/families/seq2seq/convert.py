"""Hugging Face's T5: T5ForConditionalGeneration of the first version, with ReLU and one table for all.

Hugging Face's linears are [out, in], ours [in, out]. Query, key and value are one linear here. A·E: width of all heads.

| Hugging Face                              | shape         | ours                      | shape         |
|-------------------------------------------|---------------|---------------------------|---------------|
| shared                                    | [V, H]        | tokens                    | [padded V, H] |
| SelfAttention.q, k, v                     | [A·E, H] each | attention.query_key_value | [H, 3, A·E]   |
| EncDecAttention.k, v                      | [A·E, H] each | cross.key_value           | [H, 2, A·E]   |
| block.0.layer.0....relative_attention_bias | [buckets, A] | encoder_, decoder_distances | equal       |

Block N of Hugging Face's decoder is our block L + N. A norm of theirs is next to the sub-layer's module; ours is named
after the sub-layer.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import ClassVar

from tokenizers import processors

from meshwright.data.tokenizer import Tokenizer
from meshwright.families.seq2seq.section import T5
from meshwright.families.seq2seq.specials import SENTINEL, SEQUENCE_PADDING, specials_with_room
from meshwright.training.convert.family import Family, Names, WithTokens, in_blocks, with_tokens
from meshwright.training.convert.folder import Settings

_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
_DISTANCES = "block.0.layer.0.SelfAttention.relative_attention_bias"

_OUTSIDE = {
    "tokens": "shared",
    "encoder_distances": f"encoder.{_DISTANCES}",
    "decoder_distances": f"decoder.{_DISTANCES}",
    "norm": "decoder.final_layer_norm",
}
_ATTENTION = {
    "attention_norm": "layer.0.layer_norm",
    "attention.query_key_value": tuple(f"layer.0.SelfAttention.{letter}" for letter in "qkv"),
    "attention.output": "layer.0.SelfAttention.o",
}
_CROSS = {
    "cross_norm": "layer.1.layer_norm",
    "cross.query": "layer.1.EncDecAttention.q",
    "cross.key_value": tuple(f"layer.1.EncDecAttention.{letter}" for letter in "kv"),
    "cross.output": "layer.1.EncDecAttention.o",
}


def _feed_forward(sub_layer: int) -> dict[str, str]:
    return {
        "feed_forward_norm": f"layer.{sub_layer}.layer_norm",
        "feed_forward.expand": f"layer.{sub_layer}.DenseReluDense.wi",
        "feed_forward.contract": f"layer.{sub_layer}.DenseReluDense.wo",
    }


_FIRST_VERSION = "relu"


class T5Family(Family):
    """T5ForConditionalGeneration."""

    title, model_types, section = "T5", ("t5",), T5
    outside: ClassVar = _OUTSIDE
    fields: ClassVar = {
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
    required = ("vocabulary", "hidden", "head_width", "feed_forward", "layers", "heads")
    fixed: ClassVar = {"tie_word_embeddings": True, "scale_decoder_outputs": True, "is_encoder_decoder": True}
    rows: ClassVar = {"tokens": "vocabulary"}
    copied: ClassVar = dict.fromkeys(_COPIES, "shared.weight")
    tables = frozenset({"encoder_distances", "decoder_distances"})
    # Stored by old versions and never read: the decoder's attention to the source has no distances.
    passed_over = re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")

    def names(self, model: T5) -> Names:
        encoder = in_blocks(_ATTENTION | _feed_forward(1), model.layers, "encoder.block.N")
        decoder = in_blocks(_ATTENTION | _CROSS | _feed_forward(2), model.layers, "decoder.block.N", model.layers)
        return (
            {**self.outside} | {f"blocks.{model.layers - 1}.final_norm": "encoder.final_layer_norm"} | encoder | decoder
        )

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        activation = settings.values.get("feed_forward_proj", _FIRST_VERSION)
        if activation != _FIRST_VERSION:
            reason = "T5 1.1 and its kin (mT5, Flan-T5) have gated feed-forwards, and ours is T5 1.0"
            raise settings.refused(
                f"feed_forward_proj={activation} is not supported: {reason}; valid: {_FIRST_VERSION}"
            )
        layers, decoders = settings.values.get("num_layers"), settings.values.get("num_decoder_layers")
        if decoders not in (None, layers):
            unlike = f"num_decoder_layers={decoders} is not num_layers={layers}"
            raise settings.refused(f"{unlike}: ours has one number for both")
        return {}

    def further_settings(self, model: T5) -> dict[str, object]:
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "num_decoder_layers": model.layers,
            "feed_forward_proj": _FIRST_VERSION,
            "initializer_factor": 1.0,
        }

    def with_tokenizer(self, model: T5, text: str, tokenizer: Tokenizer) -> WithTokens:
        specials = specials_with_room(model, tokenizer)
        end = tokenizer.name_of(specials.end)
        ids = {SEQUENCE_PADDING: specials.padding}
        ids |= {SENTINEL.format(index): sentinel for index, sentinel in enumerate(specials.sentinels)}
        template = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, specials.end)]
        )
        settings: dict[str, int | None] = {
            "pad_token_id": specials.padding,
            "decoder_start_token_id": specials.start,
            "eos_token_id": specials.end,
        }
        tokens = {"pad_token": SEQUENCE_PADDING, "eos_token": end}
        return WithTokens(with_tokens(text, ids, template), settings, tokens)
