"""Runs the change."""

from pathlib import Path

import torch
from trained import RUN, losses

import meshwright as mw
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.tools.evaluate.load import load_text

WORDS = ["model.family=near", "model.feed_forward=32", "model.key_value_heads=1", "model.window=4"]
BOTH = ["layout.context.size=2", "layout.pipeline.size=2"]

if __name__ == "__main__":
    alone = losses("alone", *WORDS, "checkpoint.every=3")
    assert losses("wide", *WORDS, "model.window=16") != alone, "a window has an effect"
    for kind in ("ring", "ulysses"):
        several = losses(kind, *WORDS, *BOTH, f"layout.context.kind={kind}", "memory.recompute=selective")
        assert max(abs(a - b) for a, b in zip(alone, several, strict=True)) < 1e-5, (kind, alone, several)
    words = [*WORDS, "layout.context.size=2", "layout.context.kind=ring", "data.documents=separate"]
    assert mw.verify(mw.load(RUN, words), steps=1).holds
    model, tokens, cache = load_text(Path("alone"), "cpu", None).model, torch.arange(16)[None] + 65, KeyValueCache()
    with torch.inference_mode():
        steps = [model.hidden(tokens[:, :6], cache), *(model.hidden(one, cache) for one in tokens[:, 6:].split(1, 1))]
        assert torch.allclose(torch.cat(steps, 1), model.hidden(tokens), atol=1e-5)
    assert [key.shape[2] for key, _ in cache.layers] == [3, 16], "a cache keeps what a window leaves"
    print(Path(mw.__file__).parent)
