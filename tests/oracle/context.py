"""Configs of sequences cut over ranks, and the serial reference of a model."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.config import Config, parse_config
from tests.oracle.run import run
from tests.oracle.tensor import MODELS

STEPS = 3

ONE_D = {"kind": "megatron", "size": 2}

CUT = ONE_D | {"sequence_parallel": True}

BLOCKS = {"kind": "tesseract", "q": 2, "d": 1}


def config_for(name: str, context: dict[str, Any], **changes: Any) -> Config:
    shape = {"layers": 2, "hidden": 24, "heads": 12, "vocabulary_multiple": 12, "dropout": 0.0}
    layout = {"context": context, "data": {"bucket": 8192}} | changes.pop("layout", {})
    tree = {
        "model": shape | MODELS[name] | {"positions": 48},
        "data": {"sequence": 24},
        "batch": {"global": 8, "micro": 4},
        "layout": layout,
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3}},
        "steps": STEPS,
    }
    return parse_config(tree | changes)


@cache
def serial(model: str) -> Any:
    """Return one device's losses and gradients."""
    return run(config_for(model, {}))[0]


KINDS = ["ulysses", "ring"]
