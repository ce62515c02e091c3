"""Rotary positions and experts in Hugging Face's form: what Llama's family and DeepSeek's have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.convert.family import TensorPair, TensorShape
from meshwright.convert.folder import Settings
from meshwright.models.rotary_section import ROPES, PlainRope
from meshwright.section import shown

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
"""transformers' keys of a rotation, and our fields."""
_SAME = {"default": "plain", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
"""The keys without which transformers computes no such rotation."""
_THETA = {"mixtral": 1e6}
"""The base where nothing is said, of those whose class has another than 10,000."""


def pair_of_experts(name: str, shape: TensorShape, linears: str | Sequence[str]) -> TensorPair:
    """The pair of all experts' tensor, ours [n, in, ..., out], with Hugging Face's [out, in] of each linear."""
    theirs = {f"{linear}.weight": (shape[-1], shape[1]) for linear in linears}
    return TensorPair(
        name, shape, theirs,
        lambda *parts: torch.stack(parts).unflatten(0, (shape[0], -1)).movedim(-1, 1),  # [n, in, linears, out]
        lambda whole: list(whole.view(*shape[:2], -1, shape[-1]).movedim(1, -1).flatten(0, 1)),
    )  # fmt: skip


def rope_settings(rope: PlainRope) -> dict[str, object]:
    """transformers' settings of a rotation, under their names of now and of before."""
    theirs = {ours: key for key, ours in _ROPE_KEYS.items()}
    values = {theirs[field]: value for field, value in rope.model_dump(exclude_none=True, exclude={"kind"}).items()}
    scaling = {"rope_type": next(name for name, ours in _SAME.items() if ours == rope.kind)} | values
    return {
        "rope_parameters": scaling,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "plain" else scaling,
    }


def rope_fields(settings: Settings) -> dict[str, object]:
    """Our fields of a rotation: of `rope_parameters`, or of `rope_theta` and `rope_scaling`, as they were before. As in
    transformers `rope_scaling` goes before the other, and original positions outside before those inside.

    Raises CheckpointError for a kind, or a key of one, that ours has not.
    """
    values = settings.values
    where = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    written = values.get(where) or {}
    if not isinstance(written, dict):
        raise settings.refused(f"{where}={shown(written)} is no section")
    theta = values.get("rope_theta", _THETA.get(values["model_type"], PlainRope().theta))
    theirs = {"rope_theta": theta} | {key: value for key, value in written.items() if value is not None}
    kind = theirs.pop("rope_type", theirs.pop("type", "default"))
    theirs.pop("type", None)
    if kind not in _SAME:
        raise settings.refused(f"{where}: rope_type={shown(kind)} is not supported; valid: {', '.join(_SAME)}")
    if kind in ("llama3", "yarn"):
        # Outside of the section before inside of it, as transformers reads them; where neither is there the positions
        # are the original ones.
        inside = theirs.get(_ORIGINAL, values.get("max_position_embeddings"))
        theirs[_ORIGINAL] = values.get(_ORIGINAL, inside)
    if lacking := [key for key in _NEEDED.get(kind, ()) if key not in theirs]:
        raise settings.refused(f"{where}: rope_type={kind} lacks {', '.join(lacking)}")
    # Said though it changes nothing.
    if theirs.get("partial_rotary_factor") == 1.0:
        del theirs["partial_rotary_factor"]
    known = {key: ours for key, ours in _ROPE_KEYS.items() if ours in ROPES[_SAME[kind]].model_fields}
    for key, value in theirs.items():
        if key not in known:
            raise settings.refused(f"{where}: {key}={shown(value)} is not supported; valid: {', '.join(known)}")
    return {"kind": _SAME[kind]} | {known[key]: value for key, value in theirs.items()}
