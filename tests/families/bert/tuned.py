"""Configs that tune BERT for a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config import Config, parse_config

STEPS = 3


def config_for(family: str, layout: dict[str, Any], **model: Any) -> Config:
    shape = {
        "family": family, "layers": 2, "hidden": 24, "heads": 12, "positions": 12, "vocabulary": 300,
        "vocabulary_multiple": 12, "dropout": 0.0,
    }  # fmt: skip
    tree = {
        "model": shape | model,
        "data": {"sequence": 12, "source": str(Path(__file__).parent)},
        "batch": {"global": 8, "micro": 2 if "pipeline" in layout or "data" in layout else 4},
        "layout": {"data": {"bucket": 8192}} | layout,
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3}},
        "steps": STEPS,
    }
    return parse_config(tree)
