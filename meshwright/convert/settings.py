"""Hugging Face's config.json of a GPT-2 <-> our `model` section. What ours cannot compute is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.config.schema import Gpt2
from meshwright.errors import CheckpointError

# The same function under its two names: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")

_REQUIRED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")

# What changes the mathematics: the value that ours has, which is also what a missing key means.
_FIXED: dict[str, object] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_settings(path: Path) -> Gpt2:
    """The model that a config.json describes. Raises CheckpointError naming the key that does not fit."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is no Hugging Face folder: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} holds no settings")
    _check(path, settings)
    try:
        model = Gpt2(
            layers=settings["n_layer"],
            hidden=settings["n_embd"],
            heads=settings["n_head"],
            positions=settings["n_positions"],
            vocabulary=settings["vocab_size"],
            tied=settings.get("tie_word_embeddings", True),
            dropout=_dropout(path, settings),
            norm_epsilon=settings.get("layer_norm_epsilon", 1e-5),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}") from error
    if model.hidden % model.heads:
        raise CheckpointError(f"{path}: n_head={model.heads} does not divide n_embd={model.hidden}")
    inner = settings.get("n_inner")
    if inner not in (None, model.inner):
        raise CheckpointError(f"{path}: n_inner={inner} is not supported: ours is 4 x n_embd = {model.inner}")
    return model


def _check(path: Path, settings: dict[str, Any]) -> None:
    kind = settings.get("model_type", "gpt2")
    if kind != "gpt2":
        raise CheckpointError(f"{path}: model_type={kind} is not supported; valid: gpt2")
    missing = [key for key in _REQUIRED if key not in settings]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    activation = settings.get("activation_function", ACTIVATIONS[0])
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{path}: activation_function={activation} is not supported; valid: {', '.join(ACTIVATIONS)}"
        )
    for key, ours in _FIXED.items():
        if settings.get(key, ours) != ours:
            raise CheckpointError(f"{path}: {key}={settings[key]} is not supported; valid: {ours}")


def _dropout(path: Path, settings: dict[str, Any]) -> float:
    """Ours is one number for all three places."""
    rates = {key: settings.get(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{key}={value}" for key, value in rates.items())
        raise CheckpointError(f"{path}: {listed} differ, and ours is one number: make them equal in the file")
    return rates["embd_pdrop"]


def settings_of(model: Gpt2, end: int | None, dtype: str) -> dict[str, object]:
    """The config.json of a model. `end`: the id of the end-of-text token, None where there is no tokenizer."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocabulary,
        "n_positions": model.positions,
        "n_ctx": model.positions,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": None,
        "activation_function": ACTIVATIONS[0],
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": model.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
        "use_cache": True,
    }
