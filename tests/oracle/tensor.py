"""Configs of each tensor kit and model, the cases to compare, and the serial reference of a model."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.config import Config, parse_config
from tests.oracle.run import run

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "positions": 12, "vocabulary": 300, "tied": True},
    "untied": {"family": "gpt2", "positions": 12, "vocabulary": 300, "tied": False},
    "llama": {
        "family": "llama", "positions": 12, "vocabulary": 300, "heads": 8, "key_value_heads": 4, "head_width": 6,
        "feed_forward": 40, "head_norms": True, "biases": ["query-key-value", "output", "feed-forward"],
        "rope": {"kind": "yarn", "factor": 4.0, "original": 16, "fast": 4.0, "slow": 0.25, "theta": 500.0},
    },
    "grouped": {
        "family": "llama", "positions": 12, "vocabulary": 300, "heads": 8, "key_value_heads": 2, "head_width": 6,
        "feed_forward": 40, "head_norms": True, "biases": ["query-key-value"],
    },
    "experts": {
        "family": "llama", "positions": 12, "vocabulary": 300, "feed_forward": 16,
        "experts": {"count": 4, "per_token": 2, "capacity": 1.0, "balance": 0.1},
    },
    "deepseek": {
        "family": "deepseek", "positions": 12, "vocabulary": 300, "layers": 2, "heads": 4, "query_rank": 8,
        "key_value_rank": 12, "head_width": 6, "rotary_width": 4, "value_width": 8, "feed_forward": 40,
        "rope": {"kind": "yarn", "factor": 4.0, "original": 16, "fast": 4.0, "slow": 0.25, "mscale_all_dim": 0.7},
        "experts": {
            "count": 6, "per_token": 2, "width": 12, "dense_layers": 1, "shared": 16, "scores": "sigmoid", "scale": 1.5,
            "groups": 3, "groups_per_token": 2, "bias_rate": 0.05, "balance": 0.3, "router_z": 0.01,
        },
    },
    "qwen3-next": {
        "family": "qwen3-next", "positions": 12, "vocabulary": 300, "layers": 2, "heads": 8,
        "key_value_heads": 4, "head_width": 6,
        "rotary_width": 4, "feed_forward": 40, "attention_layers": [False, True], "linear_key_heads": 4,
        "linear_value_heads": 8, "linear_key_width": 6, "linear_value_width": 5,
    },
    "bert": {"family": "bert", "positions": 12, "vocabulary": 300},
    "megatron-bert": {"family": "bert", "positions": 12, "vocabulary": 300, "norm_order": "megatron"},
    "vit": {"family": "vit", "image": 6, "patch": 2, "channels": 1, "classes": 10},
    "transformer": {"family": "transformer", "positions": 12, "vocabulary": 300, "feed_forward": 48},
    "t5": {
        "family": "t5", "positions": 12, "vocabulary": 360, "feed_forward": 48, "head_width": 3, "distance_buckets": 8,
        "distance_max": 10, "label_smoothing": 0.1,
    },
}  # fmt: skip

ONE_D = [{"kind": "megatron", "size": size} for size in (2, 3, 4)]

SEQUENCE = [layout | {"sequence_parallel": True} for layout in ONE_D]

BLOCKS = [{"kind": "tesseract", "q": q, "d": d} for q, d in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2))]

ALL = ONE_D + SEQUENCE + BLOCKS

FEW = [ONE_D[0], SEQUENCE[0], BLOCKS[1]]

LONG, SHORT = 20, 3
"""Steps: 20 if a group of ranks fits a small machine, else 3; `pytest --long` takes 20 everywhere."""

CASES = [
    *[("gpt2", tensor, 1, LONG if tensor in FEW else SHORT) for tensor in ALL],
    *[("gpt2", tensor, 2, SHORT) for tensor in ALL[:-1]],
    *[("bert", tensor, 1, SHORT) for tensor in ALL],
    *[("vit", tensor, 1, SHORT) for tensor in [*ONE_D, SEQUENCE[0], *BLOCKS]],  # 3 and 4 do not divide ViT's 10 tokens
    *[(model, tensor, 1, SHORT) for model in ("untied", "megatron-bert") for tensor in FEW],
]


def config_for(model: str, tensor: dict[str, Any], data: int = 1, **changes: Any) -> Config:
    shape = {
        "layers": 2 if model == "gpt2" else 1,
        "hidden": 24,
        "heads": 12,
        "vocabulary_multiple": 12,
        "dropout": 0.0,
    }
    tree = {
        "model": shape | MODELS[model],
        "data": {"source": "digits"} if model == "vit" else {"sequence": 12},
        "batch": {"global": 24, "micro": 12},
        "layout": {"data": {"size": data, "bucket": 8192}, "tensor": tensor},
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3}},
        "steps": LONG,
    }
    return parse_config(tree | changes)


@cache
def serial(model: str) -> Any:
    """Return one device's losses and gradients."""
    return run(config_for(model, {"kind": "none"}))[0]
