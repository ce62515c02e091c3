"""Runs the change."""

from pathlib import Path

import torch
from trained import RUN, losses

import meshwright as mw
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.tools.evaluate.load import load_text

WINDOW, CAP = 4, 0.01
SHAPE = ["model.family=near", "model.feed_forward=32", "model.key_value_heads=1"]
WORDS = [*SHAPE, f"model.window={WINDOW}", f"model.soft_cap={CAP}"]
BOTH = ["layout.context.size=2", "layout.pipeline.size=2"]


def written_out(q, k, v, sinks):
    """A softmax within the window, of scores with a soft cap, whose denominator has a sink."""
    scores = CAP * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / CAP)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().triu(1 - WINDOW)
    terms = scores.exp() * seen
    return terms / (terms.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v


def answers(out, inputs):
    torch.manual_seed(2)
    return out, *torch.autograd.grad(out, inputs, torch.randn(out.shape).double())


if __name__ == "__main__":
    alone = losses("alone", *WORDS, "checkpoint.every=3")
    for other in ("model.window=16", "model.soft_cap=50"):
        assert losses(other, *WORDS, other) != alone, f"{other} has an effect"
    wide = ["layout.tensor.kind=megatron", "layout.tensor.size=2", "memory.recompute=ops"]
    together = losses("megatron", *WORDS, *wide)
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5, (alone, together)
    for kind in ("ring", "ulysses"):
        several = losses(kind, *WORDS, *BOTH, f"layout.context.kind={kind}", "memory.recompute=selective")
        assert max(abs(a - b) for a, b in zip(alone, several, strict=True)) < 1e-5, (kind, alone, several)
    parts = ["bits={kind: layout-free, tensor: 2}"]
    exact = losses("parts", *WORDS, *parts)
    assert max(abs(a - b) for a, b in zip(alone, exact, strict=True)) < 1e-5, (alone, exact)
    assert losses("parts on ranks", *WORDS, *parts, *wide[:2]) == exact
    words = [*WORDS, "layout.context.size=2", "layout.context.kind=ring", "data.documents=separate"]
    assert mw.verify(mw.load(RUN, words), steps=1).holds
    assert mw.verify(mw.load(RUN, [*WORDS, *wide]), steps=1).holds
    model, tokens, cache = load_text(Path("alone"), "cpu", None).model, torch.arange(16)[None] + 65, KeyValueCache()
    with torch.inference_mode():
        steps = [model.hidden(tokens[:, :6], cache), *(model.hidden(one, cache) for one in tokens[:, 6:].split(1, 1))]
        assert torch.allclose(torch.cat(steps, 1), model.hidden(tokens), atol=1e-5)
    assert [key.shape[2] for key, _ in cache.layers] == [3, 16], "a cache keeps what a window leaves"
    attention = load_text(Path("alone"), "cpu", None).model.double().blocks["0"].attention
    sinks = attention.sinks.weight.requires_grad_()
    torch.manual_seed(1)
    inputs = [(torch.randn(2, heads, 16, 8).double() / 8).requires_grad_() for heads in (2, 1, 1)]
    learnt = [*inputs, sinks]
    attended = attention.core(*inputs, sinks=sinks)
    for ours, plain in zip(answers(attended, learnt), answers(written_out(*inputs, sinks), learnt), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    print(Path(mw.__file__).parent)
