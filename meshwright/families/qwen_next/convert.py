"""Hugging Face's Qwen3-Next, and Qwen3.5's text models, with and without experts.

Hugging Face's linears are [out, in], ours [in, out]. A delta net has K key heads with r value heads each, of widths E
and F; our columns are ordered by key head. Attention has K key-value heads with G queries each, of width E.

| Hugging Face                                  | shape                              | ours                 |
|-----------------------------------------------|------------------------------------|----------------------|
| linear_attn.in_proj_qkvz, in_proj_ba          | [K (2 E + 2 r F), H], [K 2 r, H]   | attention.columns    |
| of Qwen3.5: in_proj_qkv, _z, _b, _a           | [2 K E + A F, H], [A F, H], [A, H] | attention.columns    |
| linear_attn.conv1d                            | [2 K E + A F, 1, W]                | attention.taps       |
| linear_attn.A_log, dt_bias                    | [A]                                | logarithms, offsets  |
| self_attn.q_proj: a query and its gate a head | [K G 2 E, H]                       | query_key_value      |

Tensors of further layers that predict later tokens (`mtp`) are not read, as in transformers. Folders with vision are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.config.section import shown
from meshwright.families.qwen_next.section import Qwen35, QwenNext
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.family import Names, TensorPair, TensorShape, in_blocks
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.rotary import (
    DENSE,
    OUTSIDE,
    RotaryFamily,
    joined,
    names_of_experts,
    pair_by_heads,
    pair_of_experts,
    parted,
    rope_fields,
    rope_settings,
)

LINEAR, FULL = "linear_attention", "full_attention"
_IN_BLOCK = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
}
_DELTA = {
    "attention.taps": "linear_attn.conv1d",
    "attention.logarithms": "linear_attn.A_log",
    "attention.offsets": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm",
    "attention.output": "linear_attn.out_proj",
}
_BESIDE_EXPERTS = {
    "feed_forward.router": "mlp.gate",
    "shared_expert.expand": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_expert.contract": "mlp.shared_expert.down_proj",
    "shared_expert.gate": "mlp.shared_expert_gate",
}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys that a folder with experts must have."""
_TEXT_ONLY = "mrope_section", "mrope_interleaved"
"""Keys of positions of images; a text's tokens have one position each."""
_FACTOR = "partial_rotary_factor"
_ELSEWHERE: dict[str, object] = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "attn_output_gate": True,
    **dict.fromkeys(("quantization_config", "compression_config", "auto_map", "vision_config")),
}
"""Further keys that change the mathematics, with the one value that our model computes."""


class QwenNextFamily(RotaryFamily):
    """Qwen3NextForCausalLM."""

    title, section = "Qwen3-Next", QwenNext
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    classes: ClassVar[Mapping[str, str]] = {"qwen3_next": "Qwen3NextForCausalLM"}
    """Names of transformers' classes by model_type."""
    projections: ClassVar[tuple[str, ...]] = ("in_proj_qkvz", "in_proj_ba")
    """Linears of a delta net's columns."""
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
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_width": "linear_key_head_dim",
        "linear_value_width": "linear_value_head_dim",
        "convolution": "linear_conv_kernel_dim",
    }
    required = tuple(field for field in fields if field not in ("feed_forward", "tied", "norm_epsilon"))
    fixed: ClassVar = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    passed_over = re.compile(r"mtp\..*")

    def kind_of(self, model: QwenNext) -> str:
        """Return the model_type of an export."""
        return self.model_types[0]

    def read(self, settings: Settings, stored: Set[str]) -> Any:
        model: Any = super().read(settings, stored)
        groups = (
            ("key_value_heads", model.num_key_value_heads, "heads", model.heads),
            ("linear_key_heads", model.linear_key_heads, "linear_value_heads", model.linear_value_heads),
        )
        for field, divisor, whole, heads in groups:
            if heads % divisor:
                raise settings.refused(f"{self.fields[field]}={divisor} does not divide {self.fields[whole]}={heads}")
        if model.rotary_width % 2:
            raise settings.refused(f"{_FACTOR} turns {model.rotary_width} numbers of a head, and positions turn pairs")
        return model

    def names(self, model: QwenNext) -> Names:
        names: dict[str, str | Sequence[str]] = dict(OUTSIDE)
        projections = {"attention.columns": [f"linear_attn.{name}" for name in self.projections]}
        for layer in range(model.layers):
            inside: dict[str, str | Sequence[str]] = dict(_IN_BLOCK)
            inside |= _ATTENTION if model.attends(layer) else {**_DELTA, **projections}
            if model.experts is not None and model.has_experts(layer):
                inside |= _BESIDE_EXPERTS | names_of_experts(model.experts.count)
            else:
                inside |= DENSE
            names |= in_blocks(inside, 1, f"model.layers.{layer}", first=layer)
        return names

    def pair(self, name: str, shape: TensorShape, model: QwenNext, names: Names, rows: Mapping[str, int]) -> TensorPair:
        layer, _, leaf = name.rpartition(".")
        inner, theirs = layer.rpartition(".")[2], names[layer]
        if inner in ("expand", "contract") and len(shape) == (4 if inner == "expand" else 3):
            return pair_of_experts(name, shape, theirs)
        heads, width = model.linear_key_heads, model.linear_key_width
        values = model.linear_value_heads // heads
        of_values = values * model.linear_value_width
        if inner in ("logarithms", "offsets"):
            return TensorPair(name, shape, {str(theirs): shape})
        if inner == "taps":
            sizes = (width, width, of_values)
            return TensorPair(
                name, shape, {f"{theirs}.{leaf}": (shape[1], 1, shape[0])},
                lambda x: joined([x.flatten(1)], [sizes], heads).t(),
                lambda x: parted(x.t(), [sizes], heads),
            )  # fmt: skip
        if inner == "columns":
            linears = self.columns_of(width, of_values, values)
            outputs = [sum(sizes) * heads for sizes in linears]
            stored = {f"{module}.{leaf}": (count, model.hidden) for module, count in zip(theirs, outputs, strict=True)}
            return pair_by_heads(name, shape, stored, linears, heads)
        if inner == "query_key_value":
            keys, width = model.num_key_value_heads, model.head_width
            attended = [(size * width,) for size in (2 * model.heads // keys, 1, 1)]
            stored = {
                f"{module}.{leaf}": (keys * size, model.hidden)
                for module, (size,) in zip(theirs, attended, strict=True)
            }
            return pair_by_heads(name, shape, stored, attended, keys)
        return super().pair(name, shape, model, names, rows)

    def columns_of(self, width: int, of_values: int, values: int) -> list[tuple[int, ...]]:
        """Return, for each of `projections`, the rows of each of its parts in a key head; a part has the rows of all
        heads in order.

        Args:
            width: E.
            of_values: r F.
            values: r.
        """
        return [(2 * width + 2 * of_values,), (2 * values,)]

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        values = settings.values
        for key, ours in _ELSEWHERE.items():
            settings.only(key, ours)
        layers, types, every = (
            values.get(key) for key in ("num_hidden_layers", "layer_types", "full_attention_interval")
        )
        if not isinstance(layers, int) or not 0 < layers < 100_000:
            raise settings.refused(f"num_hidden_layers={shown(layers)} is no number of layers; valid: 1 or more")
        if types is None:
            every = 4 if every is None else every
            if not isinstance(every, int) or every < 1:
                raise settings.refused(f"full_attention_interval={shown(every)} is no number of layers; valid: 2, 3")
            types = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
        if not isinstance(types, list) or len(types) != layers or {LINEAR, FULL} != {*map(str, types)}:
            valid = f"a list of {layers} of {LINEAR} and {FULL}, both at least once"
            raise settings.refused(f"layer_types={shown(types)} is not supported; valid: {valid}")
        attends = [layer_type == FULL for layer_type in types]
        size = next(
            size for size in range(1, layers + 1) if all(attends[i] == attends[i % size] for i in range(layers))
        )
        where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        rope = values.get(where) or {}
        rope = dict(rope) if isinstance(rope, dict) else rope
        factor = values.get(_FACTOR, 0.25)
        if isinstance(rope, dict):
            factor = rope.pop(_FACTOR, factor)
            rope = {key: value for key, value in rope.items() if key not in _TEXT_ONLY}
        head = values.get("head_dim")
        if not isinstance(factor, float | int) or not isinstance(head, int) or not 0 < factor <= 1:
            raise settings.refused(f"{_FACTOR}={shown(factor)} is no share of head_dim={shown(head)}")
        return {
            "attention_layers": tuple(attends[:size]),
            "rope": rope_fields(Settings(settings.path, values | {where: rope})),
            "rotary_width": int(head * factor),
            **self.experts_of(settings),
        }

    def experts_of(self, settings: Settings) -> dict[str, object]:
        """Return our fields of a model's experts; {} without. Raises CheckpointError for settings of other experts."""
        values = settings.values
        if self.dense(settings):
            if values.get("intermediate_size") is None:
                raise settings.refused("lacks intermediate_size")
            return {}
        if lacking := [key for key in _EXPERTS if values.get(key) is None]:
            raise settings.refused(f"has experts, and lacks {', '.join(lacking)}")
        settings.only("output_router_logits", False, True, None)
        count, per_token, width, shared = (values[key] for key in _EXPERTS)
        experts = {
            "count": count, "per_token": per_token, "width": width, "shared": shared, "shared_gate": True,
            "renormalise": bool(values.get("norm_topk_prob", True)),
            # transformers adds the balance to the loss only with this flag, false by default.
            "balance": values.get("router_aux_loss_coef", 0.001) if values.get("output_router_logits") else 0.0,
        }  # fmt: skip
        return {"experts": experts, "feed_forward": values.get("intermediate_size") or width}

    def dense(self, settings: Settings) -> bool:
        """Return whether a folder's model has no experts. Raises CheckpointError if the folder does not say."""
        if "num_experts" not in settings.values:
            raise settings.refused("lacks num_experts, which a qwen3_next has; valid: 0 for none")
        return settings.values["num_experts"] in (0, None)

    def further_settings(self, model: QwenNext) -> dict[str, object]:
        model_type, experts, rope = self.kind_of(model), model.experts, rope_settings(model.rope)
        factor = {_FACTOR: model.rotary_width / model.head_width}
        if int(model.head_width * factor[_FACTOR]) != model.rotary_width:
            raise CheckpointError(f"no share of model.head_width={model.head_width} is {model.rotary_width}")
        rope |= {key: fields | factor for key, fields in rope.items() if isinstance(fields, dict)}
        settings: dict[str, object] = {
            "model_type": model_type,
            "architectures": [self.classes[model_type]],
            "num_key_value_heads": model.num_key_value_heads,
            "layer_types": [FULL if model.attends(layer) else LINEAR for layer in range(model.layers)],
            **rope,
            **factor,
            "initializer_range": 0.02,
            "use_cache": True,
            "pad_token_id": None,
        }
        if experts is None:
            return settings | ({"num_experts": 0} if model_type == "qwen3_next" else {})
        usual = {"shared_gate": True, "renormalise": True} | {
            field: ExpertsSection.model_fields[field].default
            for field in ("dense_layers", "scores", "scale", "groups", "bias_rate")
        }
        if model_type == "qwen3_next":
            del usual["renormalise"]
        for field, wanted in usual.items():
            if (value := getattr(experts, field)) != wanted or not experts.shared:
                has = f"{field}={shown(value)}" if experts.shared else "shared=0"
                raise CheckpointError(f"no class of transformers has {model_type}'s experts with model.experts.{has}")
        return settings | {
            **dict(zip(_EXPERTS, (experts.count, experts.per_token, model.expert_width, experts.shared), strict=True)),
            "norm_topk_prob": experts.renormalise,
            "router_aux_loss_coef": experts.balance,
            "output_router_logits": experts.balance > 0,
        }


class Qwen35Family(QwenNextFamily):
    """Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM."""

    title, section = "Qwen3.5", Qwen35
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
    classes: ClassVar[Mapping[str, str]] = {
        "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }  # fmt: skip
    projections: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    renamed = ((r"^model\.language_model\.", "model."),)
    """Names in a text model that transformers took out of a folder with vision."""

    def kind_of(self, model: QwenNext) -> str:
        return self.model_types[model.experts is not None]

    def read(self, settings: Settings, stored: Set[str]) -> Any:
        if (model_type := settings.values["model_type"]) not in self.classes:
            rule = f"model_type={model_type} has vision, which is not supported"
            raise settings.refused(f"{rule}; valid: {model_type}_text, a folder of the text model alone")
        return super().read(settings, stored)

    def columns_of(self, width: int, of_values: int, values: int) -> list[tuple[int, ...]]:
        return [(width, width, of_values), (of_values,), (values,), (values,)]

    def dense(self, settings: Settings) -> bool:
        if settings.values["model_type"] == "qwen3_5_text":
            settings.only("num_experts", None, 0)
            return True
        settings.only("norm_topk_prob", True, None)
        return False
