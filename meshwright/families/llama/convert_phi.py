"""Hugging Face's Phi3ForCausalLM: Phi-3 and Phi-4 without scaled rotary positions.

| Hugging Face | shape             | ours                      | shape            |
|--------------|-------------------|---------------------------|------------------|
| qkv_proj     | [(A + 2 K) E, H]  | attention.query_key_value | [H, K (G + 2) E] |
| gate_up_proj | [2 N, H]          | feed_forward.expand       | [H, 2, N]        |

Other names are Llama's (convert.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import ClassVar

import torch

from meshwright.families.llama.convert import ELSEWHERE, LlamaFamily
from meshwright.families.llama.convert_layers import Kind, Windows
from meshwright.families.llama.phi import Phi
from meshwright.families.llama.section import Llama
from meshwright.training.convert.family import Names, TensorPair, TensorShape
from meshwright.training.convert.folder import Settings

_OWN_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
"""The authors' classes in published folders, which transformers has."""


class PhiFamily(LlamaFamily):
    """Phi3ForCausalLM."""

    title, section = "Phi", Phi
    kinds: ClassVar[Mapping[str, Kind]] = {"phi3": Kind("Phi3", Windows(usual=None), grouped=False)}
    model_types: ClassVar[tuple[str, ...]] = tuple(kinds)
    elsewhere: ClassVar[Mapping[str, object]] = {
        key: value for key, value in ELSEWHERE.items() if key != "auto_map"
    } | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
    norm_names: ClassVar[Mapping[str, Mapping[str, str]]] = {"before": {}}

    def kind_of(self, model: Llama) -> str:
        return "phi3"

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        settings.only("auto_map", None, _OWN_CODE)
        for key in ("rope_scaling", "rope_parameters"):
            named = settings.values.get(key)
            rope_type = named.get("rope_type", named.get("type", "default")) if isinstance(named, dict) else "default"
            if rope_type != "default":  # the class turns yarn into longrope
                raise settings.refused(f"{key}: rope_type={rope_type} is not supported; valid: default")
        return super().further(settings, stored)

    def names(self, model: Llama) -> Names:
        fused = {"attention.query_key_value": "self_attn.qkv_proj", "feed_forward.expand": "mlp.gate_up_proj"}
        return {
            **super().names(model),
            **{
                f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
                for layer in range(model.layers)
                for ours, theirs in fused.items()
            },
        }

    def pair(self, name: str, shape: TensorShape, model: Llama, names: Names, rows: Mapping[str, int]) -> TensorPair:
        layer, _, leaf = name.rpartition(".")
        if layer.endswith("feed_forward.expand"):
            theirs = {f"{names[layer]}.{leaf}": (shape[1] * shape[2], shape[0])}
            return TensorPair(name, shape, theirs, lambda x: x.t(), lambda whole: [whole.flatten(1).t()])
        if not layer.endswith("query_key_value"):
            return super().pair(name, shape, model, names, rows)
        three = [f"{letter}_proj" for letter in "qkv"]
        apart = super().pair(name, shape, model, {layer: three}, rows)
        counts = [each[0] for each in apart.theirs.values()]
        return TensorPair(
            name, shape, {f"{names[layer]}.{leaf}": (sum(counts), shape[0])},
            lambda x: apart.to_ours(*x.split(counts)), lambda whole: [torch.cat(list(apart.to_theirs(whole)))],
        )  # fmt: skip
