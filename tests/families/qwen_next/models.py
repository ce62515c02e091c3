"""Small Qwen3-Next and Qwen3.5 models of both programs, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.config import Config, parse_config
from meshwright.families.qwen_next.convert import Qwen35Family, QwenNextFamily
from meshwright.families.qwen_next.model import QwenNextModel
from meshwright.ranks.grid import Grid

ONE = Grid((("data", 1),))

B, T, STEPS, VOCABULARY = 3, 70, 20, 300
"""T is more than a chunk of the delta rule."""

SHAPE: dict[str, Any] = {
    "family": "qwen3-next", "layers": 4, "hidden": 24, "heads": 6, "key_value_heads": 2, "head_width": 8,
    "rotary_width": 4, "feed_forward": 40, "positions": 96, "vocabulary": VOCABULARY, "vocabulary_multiple": 64,
    "linear_key_heads": 2, "linear_value_heads": 6, "linear_key_width": 6, "linear_value_width": 5,
}  # fmt: skip

EXPERTS = {"count": 4, "per_token": 2, "width": 12, "shared": 20, "shared_gate": True}

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"experts": EXPERTS},
    "qwen3_next, dense": {"attention_layers": [True, False], "layers": 3, "tied": True},
    "qwen3_5_text": {"family": "qwen3.5", "layers": 4},
    "qwen3_5_moe_text": {"family": "qwen3.5", "experts": EXPERTS, "rotary_width": 8},
}
"""Fields of small models."""

FAMILIES = {"qwen3-next": QwenNextFamily(), "qwen3.5": Qwen35Family()}


class InFloat64(TorchFunctionMode):
    """A mode in which float64 stays float64 in a cast to float32; transformers casts states, norms and softmaxes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how = dict(kwargs or {})
        if function is F.softmax:
            how.pop("dtype", None)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            if function is Tensor.to and args[1:2] == (torch.float32,):
                return args[0].contiguous() if "memory_format" in how else args[0]
        return function(*args, **how)


def config_of(length: int = T, **model: Any) -> Config:
    precision = {"level": "O0", "dtype": "float64"}
    return parse_config({"model": SHAPE | model, "data": {"sequence": length}, "precision": precision})


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (B, T + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def their_logits(theirs: nn.Module, tokens: Tensor) -> Tensor:
    with InFloat64():
        logits: Tensor = theirs(tokens).logits
    return logits


def as_theirs(ours: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Rename and reshape parameters, or gradients, as transformers', with the experts stacked."""
    theirs: dict[str, Tensor] = {}
    for pair in FAMILIES[config.model.family].pairs(config.model):
        x = ours[pair.name]
        unpadded = x[: len(x) - pair.padding] if pair.padding else x
        for name, part in zip(pair.theirs, pair.to_theirs(unpadded), strict=True):
            theirs[name] = part.reshape(pair.theirs[name])
    for layer in range(config.model.layers if config.model.experts is not None else 0):
        place = f"model.layers.{layer}.mlp.experts"
        if f"{place}.0.gate_proj.weight" in theirs:
            each = [
                [theirs.pop(f"{place}.{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
                for number in range(config.model.experts.count)
            ]
            theirs[f"{place}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
            theirs[f"{place}.down_proj"] = torch.stack([down for *_, down in each])
    return theirs


def hugging_face(model: QwenNextModel, config: Config) -> nn.Module:
    """Return transformers' model with our weights, in float64; angles are float32 as in every dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = FAMILIES[config.model.family].settings(config.model)
    theirs: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), experts_implementation="eager"
    ).double()
    for module in theirs.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.float()
    ours = as_theirs(dict(model.named_parameters()), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours.pop(name))
    assert ours == {}, f"not there: {list(ours)}"
    return theirs
