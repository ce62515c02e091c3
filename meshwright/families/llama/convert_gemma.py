"""Hugging Face's Gemma2ForCausalLM, and Gemma3ForCausalLM with text alone.

| Hugging Face                     | ours                   |
|----------------------------------|------------------------|
| input_layernorm                  | attention_norm         |
| post_attention_layernorm         | attention_end_norm     |
| pre_feedforward_layernorm        | feed_forward_norm      |
| post_feedforward_layernorm       | feed_forward_end_norm  |

Norms' weights are added to 1 on both sides. Other names are Llama's (convert.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, ClassVar

from meshwright.families.llama.convert import ELSEWHERE, LlamaFamily
from meshwright.families.llama.convert_layers import Kind, Windows
from meshwright.families.llama.gemma import Gemma
from meshwright.families.llama.section import Llama
from meshwright.training.convert.folder import Settings

_GELU = "gelu_pytorch_tanh"
_KEYS = {
    "query_scalar": "query_pre_attn_scalar",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
_USUAL: dict[str, dict[str, object]] = {
    "gemma2": {"query_scalar": 256, "score_cap": 50.0, "logit_cap": 30.0},
    "gemma3_text": {"query_scalar": 256, "score_cap": None, "logit_cap": None},
}
"""Defaults of the classes."""


class GemmaFamily(LlamaFamily):
    """Gemma2ForCausalLM and Gemma3ForCausalLM."""

    title, section = "Gemma", Gemma
    kinds: ClassVar[Mapping[str, Kind]] = {
        "gemma2": Kind(
            "Gemma2", Windows("by-period", period=2), biases=("attention_bias",), head_width=256, tied=True
        ),
        "gemma3_text": Kind(
            "Gemma3",
            Windows(
                "by-period", period=6, period_key="sliding_window_pattern", base=1e4, base_key="rope_local_base_freq"
            ),
            fields={"head_norms": True}, biases=("attention_bias",), base=1e6, head_width=256, tied=True,
        ),
    }  # fmt: skip
    model_types: ClassVar[tuple[str, ...]] = tuple(kinds)
    fields: ClassVar = {**LlamaFamily.fields, **_KEYS}
    elsewhere: ClassVar[Mapping[str, object]] = {
        key: value for key, value in ELSEWHERE.items() if key not in _KEYS.values()
    } | {"hidden_act": _GELU, "hidden_activation": _GELU}  # fmt: skip
    activation: ClassVar[str] = "geglu"
    norm_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "both": {
            "attention_end_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward_end_norm": "post_feedforward_layernorm",
        }
    }

    def kind_of(self, model: Llama) -> str:
        return "gemma3_text" if model.head_norms else "gemma2"

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        values, model_type = settings.values, settings.values["model_type"]
        settings.only("use_bidirectional_attention", None, False)
        caps = {field: values.get(key, _USUAL[model_type][field]) for field, key in _KEYS.items()}
        return super().further(settings, stored) | caps

    def further_settings(self, model: Any) -> dict[str, object]:
        return super().further_settings(model) | {"hidden_activation": _GELU}
