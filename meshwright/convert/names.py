"""Which tensor of Hugging Face's GPT-2 is which of ours. Both store linears as [in, out]: only names and dims differ.

| Hugging Face              | shape    | ours                                 | shape             |
|---------------------------|----------|--------------------------------------|-------------------|
| wte.weight                | [V, H]   | tokens.weight                        | [padded V, H]     |
| wpe.weight                | [P, H]   | positions.weight                     | [P, H]            |
| h.N.ln_1                  | [H]      | blocks.N.attention_norm              | [H]               |
| h.N.attn.c_attn           | [H, 3H]  | blocks.N.attention.query_key_value   | [H, 3, H]         |
| h.N.attn.c_proj           | [H, H]   | blocks.N.attention.output            | [H, H]            |
| h.N.ln_2                  | [H]      | blocks.N.feed_forward_norm           | [H]               |
| h.N.mlp.c_fc              | [H, 4H]  | blocks.N.feed_forward.expand         | [H, 4H]           |
| h.N.mlp.c_proj            | [4H, H]  | blocks.N.feed_forward.contract       | [4H, H]           |
| ln_f                      | [H]      | norm                                 | [H]               |
| lm_head.weight (untied)   | [V, H]   | head.weight                          | [padded V, H]     |

All but lm_head carry the prefix `transformer.` in a folder of a GPT2LMHeadModel; the first published ones lack it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from meshwright.config.schema import Gpt2
from meshwright.mesh import solo_mesh
from meshwright.models.gpt import GPT
from meshwright.shard import shard_specs
from meshwright.tensor.serial import SerialKit

PREFIX = "transformer."
HEAD = "lm_head.weight"

_OUTSIDE = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}


@dataclass(frozen=True)
class Pair:
    """A tensor under both names; `name` is ours."""

    name: str
    shape: tuple[int, ...]
    theirs: str
    """Without the prefix."""
    their_shape: tuple[int, ...]
    padding: int = 0
    """Rows that ours has behind theirs: the padding of the vocabulary."""

    @property
    def full_name(self) -> str:
        """Theirs as GPT2LMHeadModel has it."""
        return self.theirs if self.theirs == HEAD else PREFIX + self.theirs


def pairs_of(model: Gpt2) -> list[Pair]:
    """Every parameter of the model."""
    specs = shard_specs(GPT(model, SerialKit(solo_mesh(torch.device("meta")))))
    return [_pair(name, spec.shape, model) for name, spec in specs.items()]


def _pair(name: str, shape: tuple[int, ...], model: Gpt2) -> Pair:
    if name in ("tokens.weight", "head.weight"):
        theirs = HEAD if name == "head.weight" else "wte.weight"
        return Pair(name, shape, theirs, (model.vocabulary, *shape[1:]), shape[0] - model.vocabulary)
    is_bias = name.endswith(".bias")
    flat = (math.prod(shape),) if is_bias or len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    return Pair(name, shape, _their_name(name), flat)


def _their_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    if layer in _OUTSIDE:
        return f"{_OUTSIDE[layer]}.{kind}"
    blocks, index, inside = layer.split(".", 2)
    assert blocks == "blocks", f"{name} has no counterpart in Hugging Face's GPT-2"
    return f"h.{index}.{_IN_BLOCK[inside]}.{kind}"
