"""Small Llama models of both programs, and batches and losses for both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compute.precision import DTYPES
from meshwright.config import Config, parse_config
from meshwright.families.llama.model import LlamaModel
from meshwright.ranks.grid import Grid
from meshwright.training.convert.rotary import rope_settings

ONE = Grid((("data", 1),))

B, T, STEPS = 3, 24, 20


def config_of(dtype: str = "float64", length: int = T, **model: Any) -> Config:
    shape = {
        "family": "llama", "layers": 2, "hidden": 24, "heads": 6, "key_value_heads": 2, "feed_forward": 40,
        "positions": 64, "vocabulary": 300, "vocabulary_multiple": 64,
    }  # fmt: skip
    precision = {"level": "O0", "dtype": dtype}
    return parse_config({"model": shape | model, "data": {"sequence": length}, "precision": precision})


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(300, (B, T + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def losses_of(theirs: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(their_logits(theirs, tokens).flatten(0, 1), labels.flatten())


def their_logits(theirs: nn.Module, tokens: Tensor) -> Tensor:
    with WideSoftmax():
        logits: Tensor = theirs(tokens).logits
    return logits


class WideNorm(nn.RMSNorm):
    """A norm in float64; transformers' norms compute in float32 for every dtype."""


class WideSoftmax(TorchFunctionMode):
    """A mode with a softmax in the operand's dtype; transformers' softmax computes in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how = dict(kwargs or {})
        if function is F.softmax:
            how.pop("dtype", None)
        return function(*args, **how)


class AroundOne(nn.RMSNorm):
    """Gemma's norm, with the weight added to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight + 1, self.eps)


def hugging_face(kind: str, model: LlamaModel, config: Config) -> nn.Module:
    """Return transformers' model with our weights; for float64, norms are replaced with float64 norms."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = config.model
    rope = {
        "rope_type": {"plain": "default"}.get(shape.rope.kind, shape.rope.kind), "rope_theta": shape.rope.theta,
    }  # fmt: skip
    names = {
        "factor": "factor", "original": "original_max_position_embeddings", "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor", "slow": "beta_slow", "fast": "beta_fast",
    }  # fmt: skip
    rope |= {names[field]: value for field, value in shape.rope.model_dump().items() if field in names}
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.feed_forward, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocabulary, "max_position_embeddings": shape.positions, "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied, "rope_parameters": rope, "head_dim": shape.width_of_head,
        "attention_bias": "query-key-value" in shape.biases, "mlp_bias": "feed-forward" in shape.biases,
        "sliding_window": shape.window, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind.startswith("gemma"):
        settings |= {
            "query_pre_attn_scalar": shape.query_scalar, "attn_logit_softcapping": shape.score_cap,
            "final_logit_softcapping": shape.logit_cap,
        }  # fmt: skip
    if kind in ("olmo3", "gemma3_text"):
        settings["rope_parameters"] = {
            name: rope_settings(each)["rope_parameters"]
            for name, each in (("full_attention", shape.ropes[0]), ("sliding_attention", shape.ropes[-1]))
        }
    if kind == "smollm3":
        settings["no_rope_layers"] = [int(shape.rotates(layer)) for layer in range(shape.layers)]
    if kind == "gpt_oss":
        settings |= {"swiglu_alpha": shape.gate_slope, "swiglu_limit": shape.gate_limit}
        settings["sliding_window"] = shape.window or 128  # the class makes a window's mask in any case
    if kind.startswith(("qwen", "smollm3", "olmo3", "gemma", "gpt_oss")):
        settings["use_sliding_window"] = shape.window is not None
        settings["layer_types"] = layer_types(shape)
    if (experts := shape.experts) is not None:
        local = kind in ("mixtral", "gpt_oss")
        settings |= {
            "num_local_experts" if local else "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": shape.feed_forward, "norm_topk_prob": experts.renormalise,
            "router_aux_loss_coef": experts.balance, "shared_expert_intermediate_size": experts.shared,
        }  # fmt: skip
    theirs: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings),
        experts_implementation="eager",
        attn_implementation="eager" if kind.startswith(("gemma", "gpt")) else "sdpa",  # sdpa has no caps, no sinks
    ).to(DTYPES[config.precision.dtype])
    for path, module in list(theirs.named_modules()) if config.precision.dtype == "float64" else ():
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, name = path.rpartition(".")
            around_one = hasattr(module, "eps")  # Gemma's norm
            epsilon = module.eps if around_one else module.variance_epsilon
            norm = (AroundOne if around_one else WideNorm)(module.weight.shape[0], eps=epsilon, dtype=torch.float64)
            setattr(theirs.get_submodule(parent), name, norm)
    ours = as_theirs(dict(model.named_parameters()), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(ours[name])
    return theirs


def layer_types(shape: Any) -> list[str]:
    windows = map(shape.window_of, range(shape.layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


OUTSIDE = {
    "tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

INSIDE = {
    "attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm",
    "attention.output": "self_attn.o_proj", "feed_forward.contract": "mlp.down_proj",
    "attention_end_norm": "post_attention_layernorm", "feed_forward_end_norm": "post_feedforward_layernorm",
    "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "shared_expert.contract": "mlp.shared_expert.down_proj", "shared_expert.gate": "mlp.shared_expert_gate",
}  # fmt: skip

NORMS_BOTH = {"feed_forward_norm": "pre_feedforward_layernorm"}

EXPERTS = {
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.expand": "mlp.experts.gate_up_proj",
    "feed_forward.contract": "mlp.experts.down_proj",
}


GPT_OSS = {
    "attention.sinks": "self_attn.sinks", "feed_forward.router": "mlp.router",
    "feed_forward.expand": "mlp.experts.gate_up_proj", "feed_forward.contract": "mlp.experts.down_proj",
}  # fmt: skip
GPT_OSS_ENDS = {(True, "weight"): ".weight", (True, "bias"): ".bias", (False, "weight"): "", (False, "bias"): "_bias"}
"""Ends of transformers' names of a parameter of the router or of another module, by our names."""


def as_theirs(ours: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Rename and reshape parameters, or gradients, as transformers'."""
    model = config.model
    theirs: dict[str, Tensor] = {}
    for name, x in ours.items():
        if name in OUTSIDE:
            theirs[OUTSIDE[name]] = x[: model.vocabulary] if x.dim() > 1 else x
            continue
        _, layer, inner = name.split(".", 2)
        place, part, kind = f"model.layers.{layer}", *inner.rsplit(".", 1)
        if model.family == "gpt-oss" and part in GPT_OSS:
            end = "" if kind == "weight" and part.endswith("sinks") else GPT_OSS_ENDS[part.endswith("router"), kind]
            rows = x.transpose(-1, -2).flatten(-2) if part.endswith("expand") else x.t() if end == ".weight" else x
            theirs[f"{place}.{GPT_OSS[part]}{end}"] = rows
            continue
        if model.experts is not None and part in EXPERTS:  # [n, in, ..., out]
            theirs[f"{place}.{EXPERTS[part]}"] = x.flatten(2).mT if x.dim() > 2 else x.t()
            continue
        rows = x.flatten(1).t() if kind == "weight" and x.dim() > 1 else x.flatten()
        if model.family == "phi" and part in ("attention.query_key_value", "feed_forward.expand"):
            if part.startswith("attention"):
                queries = model.heads // model.num_key_value_heads
                heads = rows.unflatten(0, (-1, queries + 2, model.width_of_head)).split((queries, 1, 1), 1)
                theirs[f"{place}.self_attn.qkv_proj.{kind}"] = torch.cat([some.flatten(0, 2) for some in heads])
            else:
                theirs[f"{place}.mlp.gate_up_proj.{kind}"] = rows
        elif part == "attention.query_key_value":
            queries = model.heads // model.num_key_value_heads
            heads = rows.unflatten(0, (-1, queries + 2, model.width_of_head))
            for letter, some in zip("qkv", heads.split((queries, 1, 1), 1), strict=True):
                theirs[f"{place}.self_attn.{letter}_proj.{kind}"] = some.flatten(0, 2)
        elif part in ("feed_forward.expand", "shared_expert.expand"):
            module = "mlp.shared_expert" if part.startswith("shared") else "mlp"
            for which, half in zip(("gate", "up"), rows.chunk(2), strict=True):
                theirs[f"{place}.{module}.{which}_proj.{kind}"] = half
        else:
            names = INSIDE | (NORMS_BOTH if model.norms == "both" else {})
            theirs[f"{place}.{names[part]}.{kind}"] = rows
    return theirs
