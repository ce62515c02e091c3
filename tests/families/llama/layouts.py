"""Configs of Llama under layouts."""

from __future__ import annotations

from typing import Any

from meshwright.config import Config
from tests.oracle.context import BLOCKS, CUT, ONE_D, config_for

RING, ULYSSES = ({"size": 2, "kind": kind} for kind in ("ring", "ulysses"))

SUBGRAPH = {"kind": "subgraph", "size": 2}

ZERO1 = {"size": 2, "sync": "zero1", "bucket": 8192}

LAYOUTS: dict[str, dict[str, Any]] = {
    "1-D": {"tensor": ONE_D},
    "1-D of 4, cut": {"tensor": CUT | {"size": 4}},
    "2-D": {"tensor": BLOCKS},
    "2.5-D": {"tensor": BLOCKS | {"d": 2}},
    "branches": {"tensor": SUBGRAPH | {"branch": "block"}},
    "branches' cores": {"tensor": SUBGRAPH | {"branch": "attention-core"}},
    "ring": {"context": RING},
    "ulysses": {"context": ULYSSES},
    "ring of 4 x replicas": {"context": RING | {"size": 4}, "data": ZERO1},
    "ulysses x 1-D": {"context": ULYSSES, "tensor": ONE_D},
    "ring x cut x stages x replicas": {"context": RING, "tensor": CUT, "pipeline": {"size": 2}, "data": ZERO1},
    "stages x 2-D": {"pipeline": {"size": 2, "schedule": "message-driven"}, "tensor": BLOCKS},
    "slices": {"data": {"size": 2, "sync": "zero3"}},
}


def llama(layout: dict[str, Any], **changes: Any) -> Config:
    layout = dict(layout)
    micro = 2 if "pipeline" in layout or "data" in layout else 4
    return config_for("llama", layout.pop("context", {}), layout=layout, batch={"global": 8, "micro": micro}, **changes)
