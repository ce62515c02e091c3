"""Curves of a cluster file with a data sheet's numbers alone: missing fields are taken from a device of the same class.

efficiency, attention   a product fills a device if it has enough operations: the sides of products are scaled by
                        the cube root of the peaks' ratio
bandwidth               a kernel fills the memory if it touches enough bytes: points are scaled by the ratio of
                        the bandwidths; large copies get 0.87 of a data sheet's number
all other keys          values of the lender latencies               a step of NCCL
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.configs import shipped
from meshwright.ranks.errors import ConfigError

LENDERS = (
    ("cuda", "mxfp8", "dgx-b200"), ("cuda", "fp8", "dgx-h100"), ("cuda", "bf16", "dgx-a100"), ("cuda", "", "summit"),
    ("cpu", "", "two-cores"),
)  # fmt: skip
"""Clusters with a device that lends, by kind and a dtype of the peak that tells the class; the first match wins."""

_LENT = (
    "kind", "capability", "memory", "peak", "efficiency", "efficiency_low", "attention", "attentions", "norms",
    "bandwidth", "launch", "issue", "part", "elements", "reserved", "workspaces", "unseen", "host_link", "disk",
)  # fmt: skip

COPIED = 0.87
"""The share of a data sheet's memory bandwidth that large copies get, on an A100 and an H100."""

LATENCIES = (3.0e-6, 8.0e-6)
"""Seconds of a step of NCCL, within a node and beyond: an assumption of every shipped cluster."""


def completed(tree: dict[str, Any], path: Path, lender: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return a cluster file's keys with fields of the lender added, if the device has no curves of its own.

    Args:
        tree: The file's keys.
        path: The file.
        lender: Returns the keys of a shipped cluster's device, by the cluster's name.

    Raises:
        ConfigError: `device.like` is no shipped cluster.
    """
    device = tree.get("device")
    if not isinstance(device, dict):
        return tree
    if not ("like" in device or "efficiency" not in device or _is_number(device.get("bandwidth"))):
        return tree
    peak = {key: rate for key, rate in _mapping(device.get("peak")).items() if _is_number(rate)}
    of_kind = [(dtype, name) for device_type, dtype, name in LENDERS if device_type == device.get("kind", "cuda")]
    like = device.get("like") or next((name for dtype, name in of_kind if not dtype or dtype in peak), None)
    if like is None:
        return tree  # an unknown kind: refused by the check of the fields
    if str(like) not in shipped("clusters"):
        raise ConfigError.of("device.like", like, "is no cluster that we have", ", ".join(shipped("clusters")))
    lent = lender(str(like))
    shared = [dtype for dtype in ("bf16", "fp16", "float32") if dtype in peak and dtype in lent["peak"]]
    ratio = peak[shared[0]] / lent["peak"][shared[0]] if shared and peak[shared[0]] > 0 else 1.0
    for key in ("efficiency", "efficiency_low", "attention"):
        lent[key] = _scaled(lent[key], ratio ** (1 / 3))
    lent["attentions"] = {kernel: _scaled(curve, ratio ** (1 / 3)) for kernel, curve in lent["attentions"].items()}
    full = {**{key: lent[key] for key in _LENT}, **device, "like": like}
    if _is_number(full["bandwidth"]) and full["bandwidth"] > 0:
        pace = COPIED * full["bandwidth"] / lent["bandwidth"][-1][1]
        full["bandwidth"] = [(size * pace, rate * pace) for size, rate in lent["bandwidth"]]
    for links in _mapping(tree.get("links")).values():
        for level_index, level in enumerate(_mapping(links).get("levels") or ()):
            if isinstance(level, dict):
                level.setdefault("latency", LATENCIES[min(level_index, 1)])
    source = f"{tree.get('source', path.name)}; curves and figures that it leaves out: {like}"
    return {"name": path.stem, **tree, "device": full, "source": source}


def _scaled(curve: Any, by: float) -> Any:
    return curve and [(side * by, share) for side, share in curve]


def _mapping(value: object) -> dict[str, Any]:
    """Return the value, or an empty mapping for one that the check of the fields refuses."""
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
