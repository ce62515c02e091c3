"""Hugging Face's BERT: BertForPreTraining and BertForMaskedLM; with norm_order megatron, the MegatronBert classes.

Hugging Face's linears are [out, in], ours [in, out]. Query, key and value are one linear here, [in, 3, out]. Our tables
and heads have padding rows. The first published folders call a LayerNorm's weight and bias gamma and beta.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import ClassVar

from tokenizers import processors

from meshwright.compute.models.section import Transformer
from meshwright.data.tokenizer import Tokenizer
from meshwright.families.bert.model import NUM_ANSWERS, NUM_SEGMENTS
from meshwright.families.bert.section import Bert, BertTrunk
from meshwright.families.bert.specials import FIRST, MASK, NAMES, PADDING, SEPARATOR, Specials, specials_of
from meshwright.training.convert.family import Family, Names, WithTokens, in_blocks, with_tokens
from meshwright.training.convert.folder import Settings

_MODEL_TYPES = {"original": "bert", "megatron": "megatron-bert"}
_CLASSES = {"original": "Bert", "megatron": "MegatronBert"}
_ANSWERS = "cls.seq_relationship.weight"

_NORM = {"original": "bert.embeddings.LayerNorm", "megatron": "bert.encoder.ln"}
_IN_BLOCK = {
    "attention.query_key_value": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": "attention.output.dense",
    "feed_forward.expand": "intermediate.dense",
    "feed_forward.contract": "output.dense",
}
_NORMS_IN_BLOCK = {
    "original": {"attention_norm": "attention.output.LayerNorm", "feed_forward_norm": "output.LayerNorm"},
    "megatron": {"attention_norm": "attention.ln", "feed_forward_norm": "ln"},
}


class BertFamily(Family):
    """BertForPreTraining, BertForMaskedLM, and the MegatronBert classes."""

    title, model_types = "BERT", tuple(_MODEL_TYPES.values())
    rests_padding = True
    section: ClassVar[type[Transformer]] = Bert
    fields: ClassVar = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "inner": "intermediate_size",
        "positions": "max_position_embeddings",
        "vocabulary": "vocab_size",
        "norm_epsilon": "layer_norm_eps",
    }
    required = ("layers", "hidden", "heads", "positions", "vocabulary")
    fixed: ClassVar = {
        "hidden_act": "gelu",
        "type_vocab_size": NUM_SEGMENTS,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    passed_over = re.compile(r"bert\.embeddings\.position_ids")
    outside: ClassVar = {
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
        "pooler": "bert.pooler.dense",
    }
    heads: ClassVar[Mapping[str, str]] = {
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        # Only the bias is stored here; the weight is the table of tokens.
        "head": "cls.predictions",
        "next_sentence_head": "cls.seq_relationship",
    }
    """The layers of the heads: our names and Hugging Face's."""
    rows: ClassVar[Mapping[str, str | int]] = {
        "tokens": "vocabulary",
        # The head's bias has an element a token, padded like the table.
        "head": "vocabulary",
        "positions": "positions",
        "segments": NUM_SEGMENTS,
        "next_sentence_head": NUM_ANSWERS,
    }
    # transformers stores the tied table, and the head's bias, a second time under the decoder's name.
    copied: ClassVar[Mapping[str, str]] = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    # The first published folders kept TensorFlow's names.
    renamed = ((r"LayerNorm\.beta$", "LayerNorm.bias"), (r"LayerNorm\.gamma$", "LayerNorm.weight"))

    def names(self, model: BertTrunk) -> Names:
        inside = _IN_BLOCK | _NORMS_IN_BLOCK[model.norm_order]
        blocks = in_blocks(inside, model.layers, "bert.encoder.layer.N")
        return {**self.outside, **self.heads, "norm": _NORM[model.norm_order], **blocks}

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        model_type = settings.values.get("model_type", "bert")
        order = next(order for order, theirs in _MODEL_TYPES.items() if theirs == model_type)
        # config.json does not say whether there is a next-sentence head; the stored weights do.
        answers = {"next_sentence": _ANSWERS in stored} if self.section is Bert else {}
        return {"norm_order": order, **answers}

    def further_settings(self, model: BertTrunk) -> dict[str, object]:
        pretraining = "ForPreTraining" if isinstance(model, Bert) and model.next_sentence else "ForMaskedLM"
        return {
            "model_type": _MODEL_TYPES[model.norm_order],
            "architectures": [_CLASSES[model.norm_order] + (self.architecture or pretraining)],
            "initializer_range": 0.02,
        }

    def with_tokenizer(self, model: BertTrunk, text: str, tokenizer: Tokenizer) -> WithTokens:
        specials = specials_of(tokenizer)
        tokens = {"pad_token": PADDING, "cls_token": FIRST, "sep_token": SEPARATOR, "mask_token": MASK}
        return WithTokens(with_specials(text, specials), {"pad_token_id": specials.padding}, tokens)


def with_specials(text: str, specials: Specials) -> str:
    """Add BERT's special tokens and template to the text of a tokenizer.json, if missing."""
    ids = dict(zip(NAMES, (specials.padding, specials.first, specials.separator, specials.mask), strict=True))
    template = processors.TemplateProcessing(
        single=f"{FIRST} $A {SEPARATOR}",
        pair=f"{FIRST} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(FIRST, specials.first), (SEPARATOR, specials.separator)],
    )
    return with_tokens(text, ids, template)
