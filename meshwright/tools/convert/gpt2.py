"""Hugging Face's GPT-2. Both store linears as [in, out]: only names and dims differ.

| Hugging Face              | shape    | ours                                 | shape             |
|---------------------------|----------|--------------------------------------|-------------------|
| wte.weight                | [V, H]   | tokens.weight                        | [padded V, H]     |
| wpe.weight                | [P, H]   | positions.weight                     | [P, H]            |
| h.N.ln_1                  | [H]      | blocks.N.attention_norm              | [H]               |
| h.N.attn.c_attn           | [H, 3H]  | blocks.N.attention.query_key_value   | [H, 3, H]         |
| h.N.attn.c_proj           | [H, H]   | blocks.N.attention.output            | [H, H]            |
| h.N.ln_2                  | [H]      | blocks.N.feed_forward_norm           | [H]               |
| h.N.mlp.c_fc              | [H, 4H]  | blocks.N.feed_forward.expand         | [H, 4H]           |
| h.N.mlp.c_proj            | [4H, H]  | blocks.N.feed_forward.contract       | [4H, H]           |
| ln_f                      | [H]      | norm                                 | [H]               |
| lm_head.weight (untied)   | [V, H]   | head.weight                          | [padded V, H]     |

All but lm_head carry the prefix `transformer.` in a folder of a GPT2LMHeadModel; the first published ones lack it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Set

from meshwright.data.tokenizer import END, parse_tokenizer
from meshwright.models.gpt import GPT
from meshwright.models.section import Gpt2
from meshwright.tools.convert.family import Family, Pair, alike, shapes_of
from meshwright.tools.convert.settings import Settings, as_text

_PREFIX = "transformer."
_TABLE, _HEAD = f"{_PREFIX}wte.weight", "lm_head.weight"

_OUTSIDE = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}

# The same function under its two names: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
_NAMES = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "inner": "n_inner",
    "positions": "n_positions",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "layer_norm_epsilon",
}

# What changes the mathematics: the value that ours has, which is also what a missing key means.
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def _read(settings: Settings, stored: Set[str]) -> Gpt2:
    settings.require("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    settings.only("activation_function", *_ACTIVATIONS)
    for key, ours in _FIXED.items():
        settings.only(key, ours)
    return settings.model(Gpt2, _NAMES, dropout=settings.one_number(_DROPOUTS, 0.1))


def _files(model: Gpt2, tokenizer: str | None, dtype: str) -> dict[str, str]:
    end = parse_tokenizer(tokenizer, "the checkpoint's tokenizer.json").end if tokenizer is not None else None
    settings = {key: model.model_dump()[field] for field, key in _NAMES.items() if field != "inner"}
    settings |= {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_ctx": model.positions,
        "n_inner": None,
        "activation_function": _ACTIVATIONS[0],
        **dict.fromkeys(_DROPOUTS, model.dropout),
        "initializer_range": 0.02,
        **_FIXED,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    texts = {"config.json": as_text(settings)}
    if tokenizer is None:
        return texts
    about: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.positions}
    if any(token["content"] == END for token in json.loads(tokenizer).get("added_tokens", [])):
        about |= {"bos_token": END, "eos_token": END}
    return texts | {"tokenizer.json": tokenizer, "tokenizer_config.json": as_text(about)}


def _pairs(model: Gpt2) -> list[Pair]:
    return [_pair(name, shape, model) for name, shape in shapes_of(GPT, model).items()]


def _pair(name: str, shape: tuple[int, ...], model: Gpt2) -> Pair:
    if name in ("tokens.weight", "head.weight"):
        theirs = _HEAD if name == "head.weight" else _TABLE
        return alike(name, shape, theirs, (model.vocabulary, shape[1]))
    is_bias = name.endswith(".bias")
    flat = (math.prod(shape),) if is_bias or len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    return alike(name, shape, _their_name(name), flat)


def _their_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    if layer in _OUTSIDE:
        return f"{_PREFIX}{_OUTSIDE[layer]}.{kind}"
    blocks, index, inside = layer.split(".", 2)
    assert blocks == "blocks", f"{name} has no counterpart in Hugging Face's GPT-2"
    return f"{_PREFIX}h.{index}.{_IN_BLOCK[inside]}.{kind}"


GPT2 = Family(
    title="GPT-2",
    model_types=("gpt2",),
    read=_read,
    pairs=_pairs,
    files=_files,
    full_name=lambda stored: stored if stored == _HEAD or stored.startswith(_PREFIX) else _PREFIX + stored,
    copies=lambda model: {_HEAD: _TABLE} if model.tied else {},
    # The causal mask, which old versions stored beside the weights.
    passed_over=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
)
