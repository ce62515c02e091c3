"""Layouts under equal bits that cut sequences and matrices, and the run on one device to compare with."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.config import Config, parse_config
from tests.compute.bits.runs import Ended, ended

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "heads": 8, "positions": 32},
    "llama": {
        "family": "llama", "heads": 8, "key_value_heads": 2, "head_width": 8, "feed_forward": 256, "head_norms": True,
        "biases": ["query-key-value"], "positions": 32,
    },
    "bert": {"family": "bert", "heads": 8, "positions": 32, "next_sentence": True},
    "t5": {
        "family": "t5", "heads": 4, "head_width": 16, "feed_forward": 256, "distance_buckets": 8, "distance_max": 10,
        "positions": 128, "label_smoothing": 0.1, "vocabulary": 361,
    },
    "transformer": {"family": "transformer", "heads": 4, "feed_forward": 256, "positions": 32},
}  # fmt: skip
"""301 tokens in tables of 320 rows: of four ranks the last holds less. Two key-value heads for four ranks."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "O1": {"level": "O1", "dtype": "bf16"},
    "O2": {"level": "O2", "dtype": "bf16"},
}

M2 = ("layout.tensor=megatron", "layout.tensor.size=2")

M4 = ("layout.tensor=megatron", "layout.tensor.size=4")

CUT = ("layout.tensor.sequence_parallel=true",)

U2, U4 = ("layout.context=2",), ("layout.context=4",)


def config_of(model: str, precision: str, words: tuple[str, ...] = (), **bits: int) -> Config:
    tree = {
        "seed": 3,
        "model": {
            "layers": 2, "hidden": 64, "vocabulary": 301, "vocabulary_multiple": 64, "dropout": 0.1, **MODELS[model],
        },
        "data": {"sequence": 128 if model == "t5" else 32},
        "batch": {"global": 4, "micro": 2},
        "precision": PRECISIONS[precision],
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "steps": 2,
        "bits": {"kind": "layout-free", "tensor": 4, "sequence": 4} | bits,
    }  # fmt: skip
    return parse_config(tree, words)


@cache
def on_one_device(model: str, precision: str, **bits: int) -> Ended:
    return ended(config_of(model, precision, ("batch.micro=4",), **bits))


def check(model: str, precision: str, words: tuple[str, ...], **how: Any) -> None:
    assert ended(config_of(model, precision, words), **how).differing(on_one_device(model, precision)) == []


RUNS = ("bits.attention=runs", "model.dropout=0.0")
