"""Hugging Face's GptOssForCausalLM: gpt-oss-20b and gpt-oss-120b.

| Hugging Face                | shape                       | ours                          | shape            |
|-----------------------------|-----------------------------|-------------------------------|------------------|
| self_attn.sinks             | [A]                         | attention.sinks.weight        | [A]              |
| mlp.router                  | [n, H], [n]                 | feed_forward.router           | [H, n], [n]      |
| experts.gate_up_proj, _bias | [n, H, 2 N], [n, 2 N]       | feed_forward.expand           | [n, H, 2, N], [n, 2, N] |
| experts.down_proj, _bias    | [n, N, H], [n, H]           | feed_forward.contract         | the same         |

Gates and ups alternate in the 2 N columns there. Published folders store the experts' weights in MXFP4 (mxfp4.py); an
export writes these in the dtype of the others. Other names are Llama's (convert.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, cast

from meshwright.config.section import shown
from meshwright.families.llama.convert import ELSEWHERE, LlamaFamily
from meshwright.families.llama.convert_layers import ExpertNames, Kind, Windows
from meshwright.families.llama.gpt_oss import GptOss
from meshwright.families.llama.section import Llama
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.family import Names, TensorPair, TensorShape, in_blocks
from meshwright.training.convert.folder import Settings, Source
from meshwright.training.convert.mxfp4 import PackedSource

_STORED = "quantization_config"
_USUAL: dict[str, object] = {"attention_bias": True, "sliding_window": 128}
_USUAL_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Defaults of the class."""
_NAMES = {
    "attention.sinks": "self_attn.sinks",
    "feed_forward.router": "mlp.router",
    "feed_forward.expand": ("mlp.experts.gate_up_proj",),
    "feed_forward.contract": ("mlp.experts.down_proj",),
}


class GptOssFamily(LlamaFamily):
    """GptOssForCausalLM."""

    title, section = "gpt-oss", GptOss
    kinds: ClassVar[Mapping[str, Kind]] = {
        "gpt_oss": Kind(
            "GptOss", Windows("by-period", period=2), ExpertNames(expand=(), contract=(), renormalised=True),
            biases=("attention_bias",), base=150000.0, head_width=64,
        )
    }  # fmt: skip
    model_types: ClassVar[tuple[str, ...]] = tuple(kinds)
    fields: ClassVar = {**LlamaFamily.fields, "gate_slope": "swiglu_alpha", "gate_limit": "swiglu_limit"}
    elsewhere: ClassVar[Mapping[str, object]] = {key: value for key, value in ELSEWHERE.items() if key != _STORED}
    norm_names: ClassVar[Mapping[str, Mapping[str, str]]] = {"before": {}}
    alternates = True
    of_storage: ClassVar[tuple[str, ...]] = (_STORED,)

    def kind_of(self, model: Llama) -> str:
        return "gpt_oss"

    def source(self, folder: Path) -> Source:
        return PackedSource.of_safetensors(folder, self.full_name)

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        values = settings.values
        how = values.get(_STORED) or {}
        if not isinstance(how, dict) or how.get("quant_method", "mxfp4") != "mxfp4":
            raise settings.refused(f"{_STORED}={shown(how)} is not supported; valid: quant_method=mxfp4, or none")
        usual = dict(_USUAL)
        if not (values.get("rope_parameters") or values.get("rope_scaling")):
            usual["rope_scaling"] = _USUAL_ROPE
        fields = super().further(Settings(settings.path, usual | values), stored)
        fields["biases"] = (*cast(tuple[str, ...], fields["biases"]), "feed-forward")
        return fields

    def further_settings(self, model: Any) -> dict[str, object]:
        if "feed-forward" not in model.biases:
            rule = "no class of transformers has gpt_oss's experts without biases"
            raise CheckpointError(f"{rule}: model.biases={shown(model.biases)}")
        rest = tuple(name for name in model.biases if name != "feed-forward")
        settings = super().further_settings(model.model_copy(update={"biases": rest}))
        return {key: value for key, value in settings.items() if key != "mlp_bias"}

    def names(self, model: Llama) -> Names:
        return {**super().names(model), **in_blocks(_NAMES, model.layers, "model.layers.N")}

    def pair(self, name: str, shape: TensorShape, model: Llama, names: Names, rows: Mapping[str, int]) -> TensorPair:
        layer, _, leaf = name.rpartition(".")
        theirs, end = names[layer], "_bias" if leaf == "bias" else ""
        if layer.endswith("attention.sinks"):
            return TensorPair(name, shape, {str(theirs): shape})
        if not layer.endswith(("feed_forward.expand", "feed_forward.contract")):
            return super().pair(name, shape, model, names, rows)
        if layer.endswith("contract"):
            return TensorPair(name, shape, {f"{theirs[0]}{end}": shape})
        return TensorPair(
            name, shape, {f"{theirs[0]}{end}": (*shape[:-2], 2 * shape[-1])},
            lambda x: x.unflatten(-1, (-1, 2)).transpose(-1, -2), lambda whole: [whole.transpose(-1, -2).flatten(-2)],
        )  # fmt: skip
