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


def config_of(*words: str) -> Config:
    tree = {
        "seed": 3,
        "model": {
            "family": "gpt2", "layers": 1, "hidden": 64, "heads": 4, "positions": 512, "vocabulary": 50257,
            "vocabulary_multiple": 128, "dropout": 0.0,
        },
        "data": {"sequence": 512}, "batch": {"global": 2}, "steps": 1,
        "bits": {"kind": "layout-free", "tensor": 2, "hidden": 2, "sequence": 4, "attention": "runs"},
    }  # fmt: skip
    return parse_config(tree, words)


@cache
def on_one_device() -> Ended:
    return ended(config_of(), threads=2)


@pytest.mark.long
@pytest.mark.parametrize("words", [(*M2, *CUT), RING, Q2], ids=["cut by sequence", "ring", "2-D"])
def test_real_sizes_end_with_the_bits_of_one_device(words: tuple[str, ...]) -> None:
    assert ended(config_of(*words), threads=2).differing(on_one_device()) == []
