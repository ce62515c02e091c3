"""Configs of each data-parallel sync."""

from __future__ import annotations

from meshwright.config import Config, parse_config

SYNCS = ["server-loss", "server-gradient", "rooted", "allreduce", "ring", "zero1", "zero2", "zero3"]

STEPS = 20


def config_for(sync: str, size: int, **changes: object) -> Config:
    tree = {
        "model": {
            "layers": 2, "hidden": 24, "heads": 3, "positions": 12, "vocabulary": 300, "vocabulary_multiple": 8,
            "dropout": 0.0, "tied": True,
        },
        "data": {"sequence": 10},
        "batch": {"global": 12, "micro": 12 // size // (2 if size < 4 else 1)},
        "layout": {"data": {"size": size, "sync": sync, "bucket": 8192}},
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3, "decay": "cosine"}},
        "steps": STEPS,
    }  # fmt: skip
    return parse_config(tree | changes)
