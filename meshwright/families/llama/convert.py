"""Hugging Face's Llama, Qwen2, Qwen3, Mistral, Mixtral, Qwen2-MoE and Qwen3-MoE: one family here. SmolLM2 is published
as a Llama.

Hugging Face's linears are [out, in], ours [in, out]. K key-value heads with G queries each; A = K G.

| Hugging Face           | shape                        | ours                      | shape            |
|------------------------|------------------------------|---------------------------|------------------|
| embed_tokens, lm_head  | [V, H]                       | tokens, head (if untied)  | [padded V, H]    |
| q_proj, k_proj, v_proj | [A E, H], [K E, H], [K E, H] | attention.query_key_value | [H, K (G + 2) E] |
| gate_proj, up_proj     | [N, H] each                  | feed_forward.expand       | [H, 2, N]        |
| o_proj, down_proj      | [H, A E], [H, N]             | output, contract          | transposed       |
| experts.e.w1, w3       | [N, H] each                  | feed_forward.expand       | [n, H, 2, N]     |
| experts.e.w2           | [H, N]                       | feed_forward.contract     | [n, N, H]        |

Both rotate the halves of a head (rope.py), so the order of a head's columns is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.config.schema import Model
from meshwright.config.section import shown
from meshwright.families.llama.convert_layers import ExpertNames, Kind, Windows, layer_fields, layer_settings
from meshwright.families.llama.section import Llama
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.family import Names, TensorPair, TensorShape, in_blocks
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.rotary import (
    DENSE,
    OUTSIDE,
    RotaryFamily,
    names_of_experts,
    pair_by_heads,
    pair_of_experts,
    rope_settings,
)

_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    **DENSE,
}
_NORMED_BEHIND = {
    "attention_end_norm": "post_attention_layernorm",
    "feed_forward_end_norm": "post_feedforward_layernorm",
}
"""OLMo's names of a block's norms, in place of the ones above."""
_SHARED_EXPERT = {
    "shared_expert.expand": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_expert.contract": "mlp.shared_expert.down_proj",
    "shared_expert.gate": "mlp.shared_expert_gate",
}
"""Qwen2-MoE's expert for every token."""
ELSEWHERE: dict[str, object] = {
    "hidden_act": "silu",
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "attention_dropout": 0.0,
    **dict.fromkeys(("quantization_config", "compression_config")),
    "auto_map": None,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "query_pre_attn_scalar")),
    **dict.fromkeys(("attention_sinks", "clip_qkv")),
}
"""Keys of related models that change the mathematics, with the one value that our model computes."""
_COUNTS = ("num_local_experts", "num_experts")
"""Keys of the number of experts: a folder has one of them, or both."""
_WITH_EXPERTS: dict[str, object] = {"router_jitter_noise": 0.0, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Further keys like `ELSEWHERE`, of models with experts."""
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")
"""Keys of a shared expert. A class with such an expert reads only the first."""
_ATTENTION, _MLP = "attention_bias", "mlp_bias"
_BIASES = {_ATTENTION: ("query-key-value", "output"), _MLP: ("feed-forward",)}
"""Linears with biases by the key of config.json."""
_OLMO = {"whole_norms": True, "norms": "behind"}


class LlamaFamily(RotaryFamily):
    """LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM, MixtralForCausalLM,
    Qwen2MoeForCausalLM and Qwen3MoeForCausalLM."""

    title, section = "Llama", Llama
    kinds: ClassVar[Mapping[str, Kind]] = {
        "llama": Kind("Llama", biases=(_ATTENTION, _MLP), grouped=False),
        "qwen2": Kind("Qwen2", Windows("from-first", switched=True), query_biases=True),
        "qwen3": Kind(
            "Qwen3", Windows("from-first", switched=True),
            fields={"head_norms": True}, biases=(_ATTENTION,), head_width=128,
        ),
        "mistral": Kind("Mistral", Windows()),
        "mixtral": Kind(
            "Mixtral", Windows(usual=None), ExpertNames("block_sparse_moe", ("w1", "w3"), ("w2",), renormalised=True),
            base=1e6,
        ),
        "qwen2_moe": Kind(
            "Qwen2Moe", Windows("even-before", switched=True), ExpertNames(shared=True), query_biases=True
        ),
        "qwen3_moe": Kind(
            "Qwen3Moe", Windows(switched=True), ExpertNames(), fields={"head_norms": True}, biases=(_ATTENTION,)
        ),
        "smollm3": Kind(
            "SmolLM3", Windows("unrotated", switched=True, usual=None), biases=(_ATTENTION, _MLP), base=2e6, tied=True
        ),
        "olmo2": Kind("Olmo2", fields=_OLMO, biases=(_ATTENTION,), grouped=False),
        "olmo3": Kind(
            "Olmo3", Windows("by-period", period=4, base=500000.0),
            fields=_OLMO, biases=(_ATTENTION,), base=500000.0, grouped=False,
        ),
    }  # fmt: skip
    """The facts of each class, by model_type."""
    model_types: ClassVar[tuple[str, ...]] = tuple(kinds)
    fields: ClassVar = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "key_value_heads": "num_key_value_heads",
        "head_width": "head_dim",
        "feed_forward": "intermediate_size",
        "positions": "max_position_embeddings",
        "vocabulary": "vocab_size",
        "norm_epsilon": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    }
    required = ("layers", "hidden", "heads", "feed_forward", "positions", "vocabulary", "norm_epsilon")
    fixed: ClassVar = {}

    elsewhere: ClassVar[Mapping[str, object]] = ELSEWHERE
    """Keys that change the mathematics, with the one value that our model computes."""
    activation: ClassVar[str] = "swiglu"
    norm_names: ClassVar[Mapping[str, Mapping[str, str]]] = {"before": {}, "behind": _NORMED_BEHIND}
    """Names of a block's norms in place of `_IN_BLOCK`'s, by model.norms."""

    def kind_of(self, model: Llama) -> str:
        """Return the model_type of an export."""
        return _kind_of(model)

    def read(self, settings: Settings, stored: Set[str]) -> Model:
        model = super().read(settings, stored)
        assert isinstance(model, Llama), model
        if model.heads % model.num_key_value_heads:
            heads = f"num_attention_heads={model.heads}"
            raise settings.refused(f"num_key_value_heads={model.num_key_value_heads} does not divide {heads}")
        if model.head_width is None and model.hidden % model.heads:
            heads = f"num_attention_heads={model.heads}"
            raise settings.refused(f"{heads} does not divide hidden_size={model.hidden}, and there is no head_dim")
        if model.width_of_head % 2:
            raise settings.refused(f"head_dim={model.width_of_head} is odd, and rotary positions turn pairs")
        return model

    def expert_linears(self, settings: Settings) -> tuple[str, tuple[str, ...]]:
        theirs = self.kinds[settings.values["model_type"]].experts
        return ("mlp", ()) if theirs is None else (theirs.module, (*theirs.expand, *theirs.contract))

    def names(self, model: Llama) -> Names:
        if model.activation != self.activation or model.norms not in self.norm_names:
            raise CheckpointError(
                f"no class of transformers has {self.title}'s layers with model.activation={model.activation}, "
                f"model.norms={model.norms}"
            )
        inside: dict[str, str | Sequence[str]] = {**_IN_BLOCK, **self.norm_names[model.norms]}
        if model.experts is not None:
            theirs = self.kinds[model_type := self.kind_of(model)].experts
            if theirs is None:
                raise CheckpointError(f"no class of transformers has {model_type}'s layers with model.experts")
            inside["feed_forward.router"] = f"{theirs.module}.gate"
            inside |= _SHARED_EXPERT if model.experts.shared else {}
            inside |= names_of_experts(model.experts.count, theirs.module, theirs.expand, theirs.contract)
        return OUTSIDE | in_blocks(inside, model.layers, "model.layers.N")

    def pair(self, name: str, shape: TensorShape, model: Llama, names: Names, rows: Mapping[str, int]) -> TensorPair:
        layer, _, leaf = name.rpartition(".")
        if model.experts is not None and layer.endswith(("feed_forward.expand", "feed_forward.contract")):
            return pair_of_experts(name, shape, names[layer])
        if "query_key_value" not in name:
            return super().pair(name, shape, model, names, rows)
        keys, width = model.num_key_value_heads, model.width_of_head
        # Columns are ordered by key-value head with its queries, so that tensor parallelism cuts between heads.
        linears = [(size * width,) for size in (model.heads // keys, 1, 1)]
        hidden = shape[:-1]  # a bias has none
        theirs = {
            f"{module}.{leaf}": (keys * rows, *hidden) for module, (rows,) in zip(names[layer], linears, strict=True)
        }
        return pair_by_heads(name, shape, theirs, linears, keys)

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        values, model_type = settings.values, settings.values["model_type"]
        variant = self.kinds[model_type]
        for key, ours in self.elsewhere.items():
            settings.only(key, ours)
        for key in _SHARED[variant.experts is not None and variant.experts.shared :]:
            settings.only(key, None, 0)
        # The default differs between versions of these classes, and a wrong guess would reshape every head.
        if variant.grouped and values.get("num_key_value_heads") is None:
            raise settings.refused(f"lacks num_key_value_heads, which a {model_type} has")
        fields = {**layer_fields(settings, variant), **variant.fields, **_experts(settings, variant)}
        biases: tuple[str, ...] = ("query-key-value",) if variant.query_biases else ()
        for key in variant.biases:  # a class that does not read a key has no biases, even if the file has the key
            settings.only(key, False, True)
            biases += _BIASES[key] if values.get(key, False) else ()
        if variant.tied:
            fields["tied"] = values.get("tie_word_embeddings", True)
        if variant.head_width is not None and "head_dim" not in values:
            fields["head_width"] = variant.head_width
        return fields | {"biases": biases}

    def settings(self, model: Llama) -> dict[str, Any]:
        """Return the settings. Raises CheckpointError if no class of transformers has a model with these fields."""
        settings = super().settings(model)
        back = self.read(Settings(Path("config.json"), settings), frozenset())
        assert isinstance(back, Llama), back
        for field in _TOLD:
            if (value := getattr(model, field)) != getattr(back, field):
                rule = (
                    f"no class of transformers has {settings['model_type']}'s layers with model.{field}={shown(value)}"
                )
                raise CheckpointError(rule)
        return settings

    def further_settings(self, model: Llama) -> dict[str, object]:
        model_type = self.kind_of(model)
        variant, biases = self.kinds[model_type], set(model.biases)
        settings = {key: bool(set(names) & biases) for key, names in _BIASES.items()}
        wanted = {name for key, names in _BIASES.items() if settings[key] for name in names}
        unread = {names for key, names in _BIASES.items() if settings[key] and key not in variant.biases}
        # A key covers several linears, so config.json cannot express every choice of biases.
        if not variant.query_biases and (wanted != biases or unread):
            raise CheckpointError(
                f"no class of transformers has {model_type}'s layers with model.biases={shown(model.biases)}"
            )
        return {
            "model_type": model_type,
            "architectures": [f"{variant.architecture}ForCausalLM"],
            "hidden_act": self.elsewhere["hidden_act"],
            "attention_dropout": 0.0,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.width_of_head,
            **rope_settings(model.rope),
            **layer_settings(model, model_type, variant),
            "initializer_range": 0.02,
            "use_cache": True,
            "pad_token_id": None,
            **({} if variant.query_biases else settings),
            **_experts_settings(model, model_type, variant.experts),
        }


_TOLD = ("head_norms", "whole_norms", "norms", "biases", "rope", "tied", "layer_forms")
"""Fields that the export's class must have, too; `fields` and the experts are checked as they are written."""


def _kind_of(model: Llama) -> str:
    """Return the model_type of an export, from experts, norms and biases of the layers."""
    if model.norms == "behind":
        return "olmo2" if model.window is None else "olmo3"
    if model.experts is not None and model.experts.shared and model.biases == ("query-key-value",):
        return "qwen2_moe"
    if model.experts is not None:
        return "qwen3_moe" if model.head_norms else "mixtral"
    if model.head_norms or model.biases == ("query-key-value",):
        return "qwen3" if model.head_norms else "qwen2"
    if model.rotary_layers or (model.window is not None and model.window_layers):
        return "smollm3"
    return "llama" if model.window is None else "mistral"


def _experts(settings: Settings, variant: Kind) -> dict[str, object]:
    """Return our fields of a model's experts, {} without experts. Raises CheckpointError for unsupported settings."""
    values = settings.values
    if variant.experts is None:
        for key in _COUNTS:
            settings.only(key, None)
        return {}
    for key, ours in _WITH_EXPERTS.items():
        settings.only(key, ours)
    settings.only("output_router_logits", False, True, None)
    counts = [values[key] for key in _COUNTS if key in values]
    if not counts or counts[0] != counts[-1] or "num_experts_per_tok" not in values:
        raise settings.refused(f"has no number of experts: {' or '.join(_COUNTS)}, and num_experts_per_tok")
    experts = {
        "count": counts[0],
        "per_token": values["num_experts_per_tok"],
        "renormalise": variant.experts.renormalised or bool(values.get("norm_topk_prob", False)),
        # transformers adds the balance to the loss only with this flag, false by default.
        "balance": values.get("router_aux_loss_coef", 0.001) if values.get("output_router_logits") else 0.0,
    }
    if variant.experts.renormalised:
        return {"experts": experts}
    needed = ("moe_intermediate_size", *(_SHARED[:1] if variant.experts.shared else ()))
    if lacking := [key for key in needed if key not in values]:
        raise settings.refused(f"lacks {', '.join(lacking)}, which a {values['model_type']} has")
    if variant.experts.shared:
        settings.only("qkv_bias", True)
        experts |= {"shared": values[_SHARED[0]], "shared_gate": True}
    return {"experts": experts, "feed_forward": values["moe_intermediate_size"]}


def _experts_settings(model: Llama, model_type: str, theirs: ExpertNames | None) -> dict[str, object]:
    """Return transformers' settings of a model's experts, {} without experts.

    Raises CheckpointError if no class of transformers has such experts.
    """
    experts = model.experts
    if experts is None:
        return {}
    if theirs is None:
        raise CheckpointError(f"no class of transformers has {model_type}'s layers with model.experts")
    if theirs.renormalised and not experts.renormalise:
        rule = "no class of transformers has experts whose weights are not renormalised, but with norms of heads"
        raise CheckpointError(f"{rule}: model.experts.renormalise=false")
    # Fields without a key in the class must have the defaults.
    plain = {"width", "dense_layers", "scores", "scale", "groups", "bias_rate", "shared", "shared_gate"}
    plain -= {"shared", "shared_gate"} if theirs.shared and experts.shared_gate else set()
    for field in sorted(plain):
        if (value := getattr(experts, field)) != (usual := ExpertsSection.model_fields[field].default):
            rule = f"no class of transformers has {model_type}'s experts with model.experts.{field}={shown(value)}"
            raise CheckpointError(f"{rule}; valid: {shown(usual)}")
    return {
        **dict.fromkeys(_COUNTS, experts.count),
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.renormalise,
        "router_aux_loss_coef": experts.balance,
        "output_router_logits": experts.balance > 0,
        "moe_intermediate_size": model.feed_forward,
        **({_SHARED[0]: experts.shared, "qkv_bias": True} if theirs.shared else {}),
        **_WITH_EXPERTS,
    }
