"""Hugging Face's form of decoders with rotary positions and experts: the parts common to Llama's and DeepSeek's
families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshwright.compute.models.rotary_section import ROPES, PlainRope
from meshwright.config.section import shown
from meshwright.data.tokenizer import Tokenizer
from meshwright.training.convert.family import Family, TensorPair, TensorShape, WithTokens
from meshwright.training.convert.folder import Settings

OUTSIDE = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
DENSE = {"feed_forward.expand": ("mlp.gate_proj", "mlp.up_proj"), "feed_forward.contract": "mlp.down_proj"}
"""transformers' layers of a feed-forward in a block."""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {
    "rope_theta": "theta",
    "factor": "factor",
    _ORIGINAL: "original",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Our fields of a rotation, by transformers' keys."""
_SAME = {"default": "plain", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""Our kinds of rotation by transformers' rope_type."""
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""Keys that transformers requires, by rope_type."""


class RotaryFamily(Family):
    """The base of families of causal decoders with rotary positions."""

    rests_padding = True
    expert_module = "mlp.experts"
    outside: ClassVar = OUTSIDE
    rows: ClassVar = {"tokens": "vocabulary", "head": "vocabulary"}
    copied: ClassVar = {HEAD: TABLE}

    def copies(self, model: Any) -> dict[str, str]:
        return super().copies(model) if model.tied else {}

    def expert_linears(self, settings: Settings) -> tuple[str, tuple[str, ...]]:
        return "mlp", ("gate_proj", "up_proj", "down_proj")

    def with_tokenizer(self, model: Any, text: str, tokenizer: Tokenizer) -> WithTokens:
        ids = {"bos_token": tokenizer.begin, "eos_token": tokenizer.end}
        tokens = {key: tokenizer.name_of(token) for key, token in ids.items() if token is not None}
        return WithTokens(text, {f"{key}_id": token for key, token in ids.items()}, tokens)


def pair_of_experts(name: str, shape: TensorShape, linears: str | Sequence[str]) -> TensorPair:
    """Return the pair of our tensor of all n experts, [n, in, ..., out], and Hugging Face's linears [out, in]."""
    theirs = {f"{linear}.weight": (shape[-1], shape[1]) for linear in linears}
    return TensorPair(
        name, shape, theirs,
        lambda *parts: torch.stack(parts).unflatten(0, (shape[0], -1)).movedim(-1, 1),  # [n, in, linears, out]
        lambda whole: list(whole.view(*shape[:2], -1, shape[-1]).movedim(1, -1).flatten(0, 1)),
    )  # fmt: skip


def names_of_experts(
    count: int, module: str = "mlp", expand: Sequence[str] = ("gate_proj", "up_proj"),
    contract: Sequence[str] = ("down_proj",),
) -> dict[str, str | Sequence[str]]:  # fmt: skip
    """Return the names of experts' linears in a block, each expert with the linears `expand` and `contract`."""
    each = [f"{module}.experts.{index}" for index in range(count)]
    return {
        f"feed_forward.{ours}": [f"{expert}.{linear}" for expert in each for linear in linears]
        for ours, linears in (("expand", expand), ("contract", contract))
    }


def pair_by_heads(
    name: str, shape: TensorShape, theirs: Mapping[str, TensorShape], linears: Sequence[Sequence[int]], heads: int
) -> TensorPair:
    """Return the pair of one of our linears [in, out], by head, and several of Hugging Face's.

    `linears`, `heads`: as in `joined`.
    """
    return TensorPair(
        name, shape, theirs,
        lambda *parts: joined(parts, linears, heads).t(), lambda whole: parted(whole.t(), linears, heads),
    )  # fmt: skip


def joined(parts: Sequence[Tensor], linears: Sequence[Sequence[int]], heads: int) -> Tensor:
    """Join rows of several linears, each ordered by part and then by head, in the order of heads.

    Args:
        parts: the linears, each [rows, ...].
        linears: for each linear the rows of each part in a head.
        heads: number of heads.
    """
    split = [
        rows.unflatten(0, (heads, size))
        for whole, sizes in zip(parts, linears, strict=True)
        for rows, size in zip(whole.split([heads * size for size in sizes]), sizes, strict=True)
    ]
    return torch.cat(split, 1).flatten(0, 1)


def parted(rows: Tensor, linears: Sequence[Sequence[int]], heads: int) -> list[Tensor]:
    """Return the linears of joined rows: the inverse of `joined`."""
    sizes = [size for each in linears for size in each]
    split = iter(rows.unflatten(0, (heads, -1)).split(sizes, 1))
    return [torch.cat([next(split).flatten(0, 1) for _ in each]) for each in linears]


def rope_settings(rope: PlainRope) -> dict[str, object]:
    """Return transformers' settings of a rotation: `rope_parameters`, and `rope_theta` and `rope_scaling` of older
    versions."""
    theirs = {ours: key for key, ours in _ROPE_KEYS.items()}
    values = {theirs[field]: value for field, value in rope.model_dump(exclude_none=True, exclude={"kind"}).items()}
    scaling = {"rope_type": next(name for name, ours in _SAME.items() if ours == rope.kind)} | values
    return {
        "rope_parameters": scaling,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "plain" else scaling,
    }


def ropes_by_type(
    settings: Settings, base: float, sliding: dict[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Read our fields of the rotations of layers without and with a window.

    As in transformers, settings of older versions (`rope_theta`, `rope_scaling`) are those of layers without.

    Args:
        settings: of config.json.
        base: the class's default rope_theta.
        sliding: transformers' settings of layers with a window in folders that name none.
    """
    values, both = settings.values, settings.values.get("rope_parameters") or {}
    types = ("full_attention", "sliding_attention")
    if not isinstance(both, dict) or (others := [key for key in both if key not in types]):
        rule = f"rope_parameters={shown(both)} has other sections than {', '.join(types)}"
        raise settings.refused(rule if isinstance(both, dict) else f"rope_parameters={shown(both)} is no section")
    del others
    full = {"rope_parameters": both.get(types[0]), "rope_scaling": values.get("rope_scaling")}
    plain = {"rope_parameters": {**sliding, **(both.get(types[1]) or {})}, "rope_scaling": None}
    of_full, of_sliding = (rope_fields(Settings(settings.path, values | section), base) for section in (full, plain))
    return of_full, of_sliding


def rope_fields(settings: Settings, base: float = PlainRope().theta) -> dict[str, object]:
    """Read our fields of a rotation from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older versions.

    As in transformers, `rope_scaling` has priority over `rope_parameters`, and original positions outside of the
    section over positions inside. `base`: the class's default rope_theta. Raises CheckpointError for a rope_type or a
    key that our rotations do not have.
    """
    values = settings.values
    where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    written = values.get(where) or {}
    if not isinstance(written, dict):
        raise settings.refused(f"{where}={shown(written)} is no section")
    theta = values.get("rope_theta", base)
    theirs = {"rope_theta": theta} | {key: value for key, value in written.items() if value is not None}
    rope_type = theirs.pop("rope_type", theirs.pop("type", "default"))
    theirs.pop("type", None)
    if rope_type not in _SAME:
        raise settings.refused(f"{where}: rope_type={shown(rope_type)} is not supported; valid: {', '.join(_SAME)}")
    if rope_type in ("llama3", "yarn"):
        # Without either key the original positions are max_position_embeddings.
        inside = theirs.get(_ORIGINAL, values.get("max_position_embeddings"))
        theirs[_ORIGINAL] = values.get(_ORIGINAL, inside)
    if lacking := [key for key in _NEEDED.get(rope_type, ()) if key not in theirs]:
        raise settings.refused(f"{where}: rope_type={rope_type} lacks {', '.join(lacking)}")
    # Some folders have this key with the value that changes nothing.
    if theirs.get("partial_rotary_factor") == 1.0:
        del theirs["partial_rotary_factor"]
    known = {key: ours for key, ours in _ROPE_KEYS.items() if ours in ROPES[_SAME[rope_type]].model_fields}
    for key, value in theirs.items():
        if key not in known:
            raise settings.refused(f"{where}: {key}={shown(value)} is not supported; valid: {', '.join(known)}")
    return {"kind": _SAME[rope_type]} | {known[key]: value for key, value in theirs.items()}
