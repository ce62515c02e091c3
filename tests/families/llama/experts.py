"""Configs of Llama with experts under layouts, and the serial references."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.config import Config
from tests.oracle.context import CUT, ONE_D, config_for
from tests.oracle.run import run
from tests.oracle.tensor import MODELS

RING, ULYSSES = ({"size": 2, "kind": kind} for kind in ("ring", "ulysses"))

ZERO1 = {"size": 2, "sync": "zero1", "bucket": 8192}

EXPERTS = {"count": 6, "per_token": 2, "balance": 0.3}

MODEL = MODELS["llama"] | {
    "layers": 2, "hidden": 24, "vocabulary_multiple": 12, "positions": 48, "biases": [], "feed_forward": 12,
    "experts": EXPERTS,
}  # fmt: skip

OSS: dict[str, Any] = MODEL | {
    "family": "gpt-oss", "head_norms": False, "biases": ["query-key-value", "output", "feed-forward"],
    "window": 7, "window_layers": [True, False], "gate_slope": 2.5, "gate_limit": 0.05,
    "rope": {"kind": "yarn", "factor": 4.0, "original": 16, "fast": 4.0, "slow": 0.25, "truncate": False},
    "experts": {"count": 6, "per_token": 2, "balance": 0.3},
}  # fmt: skip
"""gpt-oss, with gates and ups bounded near the median: about half of the slopes are zero."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D": {"tensor": ONE_D},
    "1-D, cut": {"tensor": CUT},
    "ring": {"context": RING},
    "ulysses x cut": {"context": ULYSSES, "tensor": CUT},
    "stages": {"pipeline": {"size": 2, "schedule": "message-driven"}},
    "experts": {"data": {"size": 2, "expert": 2}},
    "experts x replicas": {"data": ZERO1 | {"size": 4, "expert": 2}},
    "experts x cut": {"data": {"size": 2, "expert": 2}, "tensor": CUT},
    "experts x stages x ring": {"data": {"size": 2, "expert": 2}, "pipeline": {"size": 2}, "context": RING},
    "experts x slices": {"data": {"size": 4, "expert": 2, "sync": "zero3"}},
    "experts x groups of slices": {"data": {"size": 4, "expert": 2, "shard": 2, "sync": "zero3"}},
    "experts x chunks": {"data": {"size": 2, "expert": 2}, "pipeline": {"size": 2, "chunks": 2, "schedule": "1f1b"}},
    "experts x slices of gradients x chunks in a v": {
        "data": {"size": 4, "expert": 2, "sync": "zero2"},
        "pipeline": {"size": 2, "chunks": 2, "placement": "v", "schedule": "message-driven", "limit": 4},
    },
    "ring x cut x stages x replicas": {"context": RING, "tensor": CUT, "pipeline": {"size": 2}, "data": ZERO1},
}  # fmt: skip

BOUNDED = MODEL | {"experts": EXPERTS | {"capacity": 0.75}}

BOUNDED_LAYOUTS = {
    "1-D, cut": {"tensor": CUT},
    "ulysses": {"context": ULYSSES},
    "ring x cut": {"context": RING, "tensor": CUT},
    "experts x ring x stages": {"data": {"size": 2, "expert": 2}, "pipeline": {"size": 2}, "context": RING},
    "experts x replicas": {"data": ZERO1 | {"size": 4, "expert": 2}},
    "experts x slices": {"data": {"size": 4, "expert": 2, "sync": "zero3"}},
}


def experts(layout: dict[str, Any], **changes: Any) -> Config:
    layout = dict(layout)
    micro = 2 if "pipeline" in layout or "data" in layout else 4
    settings = {"model": MODEL, "layout": layout, "batch": {"global": 8, "micro": micro}} | changes
    return config_for("llama", layout.pop("context", {}), **settings)


@cache
def serial() -> Any:
    """Return the losses and gradients of one device."""
    return run(experts({}))[0]


@cache
def bounded_serial(rows: int = 8) -> Any:
    return run(experts({}, model=BOUNDED, batch={"global": rows, "micro": 2}))[0]
