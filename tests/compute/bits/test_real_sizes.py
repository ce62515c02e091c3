"""`bits: layout-free` at a real vocabulary and many tokens, with ranks of two threads: chunks of logits and products
that threads share end with the bits of one device."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.config import Config, parse_config
from tests.compute.bits.cut_layouts import CUT, M2, U2
from tests.compute.bits.runs import Ended, ended

RING = (*U2, "layout.context.kind=ring")
Q2 = ("layout.tensor=tesseract", "layout.tensor.q=2")


MODELS = {
    "gpt2": {"family": "gpt2", "vocabulary": 50257},
    "experts": {
        "family": "llama", "key_value_heads": 2, "feed_forward": 128, "vocabulary": 32000,
        "experts": {"count": 8, "per_token": 2, "balance": 0.02, "router_z": 0.001},
    },
    "gemma": {
        "family": "gemma", "key_value_heads": 2, "head_width": 16, "query_scalar": 16, "feed_forward": 128,
        "vocabulary": 256000, "window": 128, "window_layers": [True], "score_cap": 50.0, "logit_cap": 30.0,
    },
    "olmo": {"family": "llama", "feed_forward": 128, "vocabulary": 100352, "whole_norms": True, "norms": "behind"},
}  # fmt: skip
EXPERTS = ("layout.data=2", "layout.data.expert=2", "batch.micro=1")
LAYOUTS = [
    *((model, words) for model in ("gpt2", "gemma", "olmo") for words in ((*M2, *CUT), RING, Q2)),
    *(("experts", words) for words in ((*M2, *CUT), RING, (*M2, *EXPERTS))),
]


def config_of(model: str, *words: str) -> Config:
    tree = {
        "seed": 3,
        "model": {
            "layers": 1, "hidden": 64, "heads": 4, "positions": 512, "vocabulary_multiple": 128, "dropout": 0.0,
            **MODELS[model],
        },
        "data": {"sequence": 512}, "batch": {"global": 2}, "steps": 1,
        "bits": {
            "kind": "layout-free", "tensor": 2, "hidden": 1 if model == "experts" else 2, "sequence": 4,
            "attention": "runs",
        },
    }  # fmt: skip
    return parse_config(tree, words)


@cache
def on_one_device(model: str) -> Ended:
    return ended(config_of(model), threads=2)


@pytest.mark.long
@pytest.mark.parametrize("model, words", LAYOUTS)
def test_real_sizes_end_with_the_bits_of_one_device(model: str, words: tuple[str, ...]) -> None:
    assert ended(config_of(model, *words), threads=2).differing(on_one_device(model)) == []
