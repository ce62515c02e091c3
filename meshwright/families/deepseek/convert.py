"""Hugging Face's DeepSeek-V3, also the form of DeepSeek-R1, Moonlight and Kimi-K2 (model_type `deepseek_v3`; Kimi-K2's
`kimi_k2` has the same classes).

Hugging Face's linears are [out, in], ours [in, out]. A heads, of width E + P in queries, E + V in keys and values.

| Hugging Face                     | shape              | ours                       | shape          |
|----------------------------------|--------------------|----------------------------|----------------|
| embed_tokens, lm_head            | [V, H]             | tokens, head (if untied)   | [padded V, H]  |
| q_a_proj; q_b_proj, or q_proj    | [r_q, H]; [A (E + P), r_q] | query_latent; query | transposed     |
| kv_a_proj_with_mqa               | [r + P, H]         | latent, shared_key         | [H, r], [H, P] |
| kv_b_proj                        | [A (E + V), r]     | key_value                  | transposed     |
| mlp.gate, e_score_correction_bias | [n, H], [n]       | router                     | [H, n], [n]    |
| experts.e, shared_experts, mlp   | [N, H], [H, N]     | expand, contract           | as Llama's     |

Hugging Face rotates neighbouring numbers of a head (`rope_interleave`), our model its halves: an import reorders the
columns of a rotary part to 0, 2, 4, ..., 1, 3, 5, ... Scores stay the same, since queries are reordered like keys.

Layers from `model.layers.L` on predict later tokens. transformers does not save them, but keeps
`num_nextn_predict_layers`, so an import counts the layers with stored weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import ClassVar

import torch
from torch import Tensor

from meshwright.config.section import shown
from meshwright.families.deepseek.section import DeepSeek
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.family import Names, TensorPair, TensorShape, in_blocks
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.rotary import (
    DENSE,
    HEAD,
    OUTSIDE,
    TABLE,
    RotaryFamily,
    names_of_experts,
    pair_of_experts,
    rope_fields,
    rope_settings,
)

_ATTENTION = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.query_latent": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.latent": "self_attn.kv_a_proj_with_mqa",
    "attention.shared_key": "self_attn.kv_a_proj_with_mqa",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.key_value": "self_attn.kv_b_proj",
    "attention.output": "self_attn.o_proj",
}
_BESIDE_EXPERTS = {
    "feed_forward.router": "mlp.gate",
    "shared_expert.expand": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_expert.contract": "mlp.shared_experts.down_proj",
}
_LATER = {
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "of_token": "eh_proj",
    "of_hidden": "eh_proj",
    "norm": "shared_head.norm",
}
_TYPE, _KIMI = "deepseek_v3", "kimi_k2"
_CODE = ("configuration_deepseek.DeepseekV3Config", "modeling_deepseek.DeepseekV3")
"""Prefixes of the classes in a published folder's own code that transformers has as well."""
_EXPERTS = {
    "n_routed_experts": "count",
    "num_experts_per_tok": "per_token",
    "moe_intermediate_size": "width",
    "first_k_dense_replace": "dense_layers",
    "norm_topk_prob": "renormalise",
    "routed_scaling_factor": "scale",
    "n_group": "groups",
    "topk_group": "groups_per_token",
}
"""Our fields of experts by Hugging Face's keys; a folder must have all keys."""
_ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_interleave": True,
    **dict.fromkeys(("quantization_config", "compression_config")),
}
"""Keys that change the mathematics, with the one value that our model computes; a missing key means this value."""


class DeepSeekFamily(RotaryFamily):
    """DeepseekV3ForCausalLM."""

    title, section = "DeepSeek", DeepSeek
    model_types = (_TYPE, _KIMI)
    told_by = "kv_lora_rank"
    fields: ClassVar = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "query_rank": "q_lora_rank",
        "key_value_rank": "kv_lora_rank",
        "head_width": "qk_nope_head_dim",
        "rotary_width": "qk_rope_head_dim",
        "value_width": "v_head_dim",
        "feed_forward": "intermediate_size",
        "positions": "max_position_embeddings",
        "vocabulary": "vocab_size",
        "norm_epsilon": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    }
    required = tuple(field for field in fields if field != "tied")
    fixed: ClassVar = _ONLY

    def names(self, model: DeepSeek) -> Names:
        if model.activation != "swiglu":
            raise CheckpointError(f"no class of transformers has DeepSeek's layers with {model.activation}")
        names: dict[str, str | Sequence[str]] = dict(OUTSIDE)
        query = "self_attn.q_proj" if model.query_rank is None else "self_attn.q_b_proj"
        for layer in range(model.layers + model.later_tokens):
            inside: dict[str, str | Sequence[str]] = {**_ATTENTION, "attention.query": query}
            experts = range(model.experts.count if model.experts is not None and model.has_experts(layer) else 0)
            inside |= _BESIDE_EXPERTS | names_of_experts(len(experts)) if experts else DENSE
            if layer < model.layers:
                names |= in_blocks(inside, 1, f"model.layers.{layer}", first=layer)
            else:
                later = {f"block.{ours}": theirs for ours, theirs in inside.items()} | _LATER
                names |= in_blocks(later, 1, f"model.layers.{layer}", first=layer - model.layers, ours="later")
        return names

    def copies(self, model: DeepSeek) -> dict[str, str]:
        copies = super().copies(model)
        # Published folders repeat the table and the head in each layer of a later token.
        for layer in range(model.layers, model.layers + model.later_tokens):
            copies[f"model.layers.{layer}.embed_tokens.weight"] = TABLE
            copies[f"model.layers.{layer}.shared_head.head.weight"] = TABLE if model.tied else HEAD
        return copies

    def pair(self, name: str, shape: TensorShape, model: DeepSeek, names: Names, rows: Mapping[str, int]) -> TensorPair:
        layer, _, leaf = name.rpartition(".")
        inner = layer.rpartition(".")[2]
        if layer.endswith("feed_forward.router") and leaf == "bias":
            theirs = f"{names[layer]}.e_score_correction_bias"
            return TensorPair(name, shape, {theirs: shape}, single=True)
        if inner in ("expand", "contract") and len(shape) == (4 if inner == "expand" else 3):
            return pair_of_experts(name, shape, names[layer])
        if inner in ("latent", "shared_key"):  # slices of one linear [r + P, H]
            rank, rows_of_both = model.key_value_rank, model.key_value_rank + model.rotary_width
            whole = {f"{names[layer]}.{leaf}": (rows_of_both, model.hidden)}
            if inner == "latent":
                return TensorPair(name, shape, whole, lambda x: x.t(), lambda x: [x.t()], part=(0, 0, rank))
            bounds = (0, rank, rows_of_both)
            return TensorPair(
                name, shape, whole, lambda x: _reordered(x, True).t(), lambda x: [_reordered(x.t(), False)], part=bounds
            )
        if inner in ("of_token", "of_hidden"):  # slices of one linear [H, 2 H]
            width = model.hidden
            bounds = (1, 0, width) if inner == "of_token" else (1, width, 2 * width)
            whole = {f"{names[layer]}.{leaf}": (width, 2 * width)}
            return TensorPair(name, shape, whole, lambda x: x.t(), lambda x: [x.t()], part=bounds)
        if inner == "query":
            # Each head's rotary part is reordered.
            split = (model.head_width, model.rotary_width)
            return TensorPair(
                name, shape, {f"{names[layer]}.{leaf}": (shape[1], shape[0])},
                lambda x: _in_heads(x, model.heads, split, True).t(),
                lambda x: [_in_heads(x.t(), model.heads, split, False)],
            )  # fmt: skip
        return super().pair(name, shape, model, names, rows)

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        values, code = settings.values, settings.values.get("auto_map") or {}
        classes = code.values() if isinstance(code, dict) else [code]
        # A folder's own code is never run: its classes must be known to be transformers'.
        if unknown := [name for name in classes if not (isinstance(name, str) and name.startswith(_CODE))]:
            rule = f"auto_map has {shown(unknown[0])}, which is not supported"
            raise settings.refused(f"{rule}; valid: {', '.join(_CODE)}")
        if (heads := values.get("num_attention_heads")) != (keys := values.get("num_key_value_heads", heads)):
            raise settings.refused(f"num_key_value_heads={shown(keys)} is not num_attention_heads={shown(heads)}")
        layers, later = values.get("num_hidden_layers"), 0
        while f"model.layers.{layers}.eh_proj.weight" in {*stored} and isinstance(layers, int):
            layers, later = layers + 1, later + 1
        fields: dict[str, object] = {"rope": rope_fields(settings), "later_tokens": later}
        layers, count = values.get("num_hidden_layers"), values.get("n_routed_experts")
        dense = values.get("first_k_dense_replace", 3)
        if count is None or (isinstance(layers, int) and isinstance(dense, int) and dense >= layers):
            return fields
        if lacking := [key for key in (*_EXPERTS, "n_shared_experts") if values.get(key) is None]:
            raise settings.refused(f"has n_routed_experts={shown(count)}, and lacks {', '.join(lacking)}")
        counts = ("n_routed_experts", "n_group", "n_shared_experts", "moe_intermediate_size")
        if wrong := [key for key in counts if type(values[key]) is not int or values[key] < 1]:
            raise settings.refused(f"{wrong[0]}={shown(values[wrong[0]])} is no whole number above 0")
        if count % (groups := values["n_group"]):
            raise settings.refused(f"n_group={groups} does not divide n_routed_experts={count}")
        experts = {ours: values[key] for key, ours in _EXPERTS.items()}
        shared = values["n_shared_experts"] * values["moe_intermediate_size"]
        # transformers has no balancing loss and keeps biases fixed; a run that wants either writes out its own model.
        return fields | {"experts": experts | {"shared": shared, "scores": "sigmoid", "bias_rate": 0.0}}

    def further_settings(self, model: DeepSeek) -> dict[str, object]:
        experts = model.experts
        settings: dict[str, object] = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_key_value_heads": model.heads,
            **rope_settings(model.rope),
            "num_nextn_predict_layers": model.later_tokens,
            "initializer_range": 0.02,
            "use_cache": True,
        }
        if experts is None:
            # The class always has experts: with all layers dense, none is ever built.
            dense = {"first_k_dense_replace": model.layers + model.later_tokens, "norm_topk_prob": True}
            ones = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group")
            unused = {"moe_intermediate_size": model.feed_forward, "routed_scaling_factor": 1.0}
            return settings | dense | dict.fromkeys(ones, 1) | unused
        multiple = experts.shared > 0 and experts.shared % model.expert_width == 0
        refused = {
            "scores": experts.scores != "sigmoid",
            "bias_rate": experts.bias_rate is None,
            "shared": not multiple,
            "shared_gate": experts.shared_gate,
        }
        for field, wrong in refused.items():
            if wrong:
                has = f"model.experts.{field}={shown(getattr(experts, field))}"
                raise CheckpointError(f"no class of transformers has experts with {has}")
        values = experts.model_dump() | {"width": model.expert_width}
        settings |= {key: values[ours] for key, ours in _EXPERTS.items()}
        return settings | {"n_shared_experts": experts.shared // model.expert_width}


def _reordered(rows: Tensor, to_halves: bool) -> Tensor:
    """Reorder rows [P, H] from neighbouring pairs to halves: 0, 2, 4, ..., then 1, 3, 5, ...; or back."""
    return rows.unflatten(0, (-1, 2) if to_halves else (2, -1)).transpose(0, 1).flatten(0, 1)


def _in_heads(rows: Tensor, heads: int, split: tuple[int, int], to_halves: bool) -> Tensor:
    """Rows [A (E + P), r] with each head's rotary part reordered; `split`: (E, P)."""
    plain, rotary = rows.unflatten(0, (heads, -1)).split(split, 1)
    return torch.cat([plain, torch.stack([_reordered(head, to_halves) for head in rotary])], 1).flatten(0, 1)
