"""Hugging Face's GPT-2, which stores linears as [in, out] like ours: only names and dims differ.

| Hugging Face       | shape    | ours                      | shape         |
|--------------------|----------|---------------------------|---------------|
| wte, lm_head       | [V, H]   | tokens, head (if untied)  | [padded V, H] |
| attn.c_attn        | [H, 3H]  | attention.query_key_value | [H, 3, H]     |
| all others         |          |                           | the same      |

Names but lm_head have the prefix `transformer.` in a folder of GPT2LMHeadModel; the first published folders lack it.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import ClassVar

from meshwright.data.tokenizer import Tokenizer
from meshwright.families.gpt.section import Gpt2
from meshwright.training.convert.family import Family, WithTokens
from meshwright.training.convert.folder import Settings

# Two names of one function: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")


class Gpt2Family(Family):
    """GPT2LMHeadModel."""

    title, model_types, section = "GPT-2", ("gpt2",), Gpt2
    told_by = "n_embd"  # OpenAI's folders have no model_type
    fields: ClassVar = {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "inner": "n_inner",
        "positions": "n_positions",
        "vocabulary": "vocab_size",
        "tied": "tie_word_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
    }
    required = ("vocabulary", "positions", "hidden", "layers", "heads")
    fixed: ClassVar = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    dropouts = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
    outside: ClassVar = {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    inside: ClassVar = {
        "attention_norm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.expand": "mlp.c_fc",
        "feed_forward.contract": "mlp.c_proj",
    }
    block = "transformer.h.N"
    rows: ClassVar = {"tokens": "vocabulary", "head": "vocabulary", "positions": "positions"}
    copied: ClassVar = {"lm_head.weight": "transformer.wte.weight"}
    # The first published folders lack the prefix.
    renamed = ((r"^(?!transformer\.|lm_head\.weight\Z)", "transformer."),)
    stores_out_in = False
    # The causal mask, a buffer that old versions stored.
    passed_over = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")

    def copies(self, model: Gpt2) -> dict[str, str]:
        return super().copies(model) if model.tied else {}

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        settings.only("activation_function", *_ACTIVATIONS)
        return {}

    def further_settings(self, model: Gpt2) -> dict[str, object]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "n_ctx": model.positions,
            "n_inner": None,
            "activation_function": _ACTIVATIONS[0],
            "initializer_range": 0.02,
            "use_cache": True,
        }

    def with_tokenizer(self, model: Gpt2, text: str, tokenizer: Tokenizer) -> WithTokens:
        name = tokenizer.name_of(tokenizer.end)
        tokens = {"bos_token": name, "eos_token": name} if name in tokenizer.special_tokens else {}
        return WithTokens(text, {"bos_token_id": tokenizer.first, "eos_token_id": tokenizer.end}, tokens)
