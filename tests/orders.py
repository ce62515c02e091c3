"""Configs of layouts with other orders of axes."""

from __future__ import annotations

from typing import Any

from meshwright.config import Config, parse_config

SUBGRAPH = {"kind": "subgraph", "size": 2}

TESSERACT = {"kind": "tesseract", "q": 2, "d": 2}

MEGATRON = {"kind": "megatron", "size": 2}

LAYOUTS: dict[str, dict[str, Any]] = {
    "branch-data": {"data": {"size": 2, "sync": "zero1"}, "tensor": SUBGRAPH},
    "branch-pipe-data": {"data": {"size": 2}, "pipeline": {"size": 2}, "tensor": SUBGRAPH | {"common": "one"}},
    "branch-pipe": {"pipeline": {"size": 2}, "tensor": SUBGRAPH | {"branch": "attention-core"}},
    "col-row-depth": {"tensor": TESSERACT},
    "col-data-row": {"data": {"size": 2, "sync": "server-gradient"}, "tensor": TESSERACT | {"d": 1}},
    "tensor-data-pipe": {"data": {"size": 2}, "pipeline": {"size": 2, "schedule": "1f1b"}, "tensor": MEGATRON},
    "row:2-col:2-row-col": {"tensor": TESSERACT | {"q": 4, "d": 1}},
    "tensor:2-data-tensor": {
        "data": {"size": 2, "sync": "zero1"}, "tensor": MEGATRON | {"size": 4, "sequence_parallel": True},
    },
    "pipe:2-data-pipe": {"data": {"size": 2, "sync": "zero1"}, "pipeline": {"size": 4, "schedule": "1f1b"}},
    "data:2-tensor-data": {"data": {"size": 4, "sync": "zero2"}, "tensor": MEGATRON},
}  # fmt: skip
"""Layouts by order: pipe innermost, branch outermost; a tied table on both ends of a pipeline; slices and roots.

The last are axes split into parts, with other axes between the parts.
"""


def config_for(order: str, **changes: Any) -> Config:
    """Return a config with four layers, so that stages have layers, and 24 samples in two microbatches a replica."""
    layout = {"order": order.split("-"), **LAYOUTS[order]} if order != "auto" else {}
    replicas = layout.get("data", {}).get("size", 1)
    tree = {
        "model": {
            "family": "gpt2", "layers": 4, "hidden": 24, "heads": 4, "positions": 12, "vocabulary": 300, "tied": True,
            "vocabulary_multiple": 12, "dropout": 0.0,
        },
        "data": {"sequence": 12},
        "batch": {"global": 24, "micro": 12 // replicas},
        "layout": layout,
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3}},
        "steps": 3,
    }  # fmt: skip
    return parse_config(tree | changes)
