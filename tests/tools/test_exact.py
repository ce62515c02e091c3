"""Exact generation: with a cache, alone and batched, equal to the bit; a cache with a mistake is found."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.compute.bits.cached import CachedRun
from meshwright.compute.bits.head import PartHead
from meshwright.compute.context.context import TOKENS
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.parameters.initial import initialise
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.tools.exact import Continued, ExactDecoder, greedy, require_exact

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 2, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 300},
    "llama": {
        "family": "llama", "layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "feed_forward": 128,
        "positions": 64, "vocabulary": 300, "window": 24, "window_layers": [True, False],
    },
}  # fmt: skip
PROMPTS = {0: [5, 6, 7, 8, 9], 1: [*range(20, 40)]}


def config_of(family: str, bits: dict[str, Any], **changes: Any) -> Config:
    run = {"model": MODELS[family], "data": {"sequence": 64}, "batch": {"global": 8}, "device": "cpu"}
    return parse_config(run | changes | {"bits": {"kind": "layout-free", **bits}})


RUNS = config_of("gpt2", {"samples": 2, "tensor": 2, "hidden": 2, "sequence": 4, "attention": "runs"})
HEADS = config_of("gpt2", {"samples": 2, "tensor": 2, "sequence": 2})
WINDOWS = config_of("llama", {"samples": 2, "tensor": 2, "sequence": 4, "attention": "runs"})
WHOLE = config_of("gpt2", {"samples": 2, "tensor": 2})
SEPARATE = config_of(
    "gpt2", {"samples": 2, "sequence": 4, "attention": "runs"}, data={"sequence": 64, "documents": "separate"}
)

NAMES = ["runs", "heads", "windows", "whole", "separate"]


def decoder_of(config: Config, *, cached: bool) -> ExactDecoder:
    decoder = ExactDecoder(config, torch.device("cpu"), cached=cached)
    initialise(decoder.chain, decoder.mesh, 1)
    with torch.no_grad():
        for parameter in decoder.chain.parameters():
            parameter.mul_(4)  # else all tokens have nearly equal probability
    return decoder


def up_to(count: int) -> Any:
    """Return a rule that stops a row after `count` new tokens, taken greedily."""
    return lambda place, end, logits: None if end - len(PROMPTS[place]) >= count else greedy(place, end, logits)


@pytest.mark.parametrize("config", [RUNS, HEADS, WINDOWS, WHOLE, SEPARATE], ids=NAMES)
def test_every_way_has_the_bits_of_the_whole_forward_pass(config: Config) -> None:
    whole = decoder_of(config, cached=False).continued(PROMPTS, up_to(20))
    cached = decoder_of(config, cached=True)
    assert cached.continued(PROMPTS, up_to(20)) == whole
    alone: dict[int, Continued] = {}
    for place, prompt in PROMPTS.items():
        alone |= cached.continued({place: prompt}, up_to(20))
    assert alone == whole
    assert [len(row.tokens) for row in whole.values()] == [20, 20]

    # One forward pass over the finished rows, with other tokens after the rows, and the training head's losses.
    decoder = decoder_of(config, cached=False)
    rows = torch.randint(0, 300, (2, 65), generator=torch.Generator().manual_seed(2))
    for place, row in whole.items():
        tokens = [*PROMPTS[place], *row.tokens]
        rows[place, : len(tokens)] = torch.tensor(tokens)
    head = decoder.chain.head
    assert isinstance(head, PartHead)
    observed = head.observe()
    head(torch.cat(decoder.states(rows[:, :-1].contiguous(), range(decoder.runs)), 1), rows[:, 1:].contiguous(), 1.0)
    ((_, losses),) = observed
    for place, row in whole.items():
        begin = len(PROMPTS[place]) - 1
        assert (-losses[place, begin : begin + 20]).tolist() == row.logs


def late(self: CachedRun, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend to a cache with keys a place too late."""
    return right(self, query, key.roll(1, TOKENS), value, spec)


def stale(self: CachedRun, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attend without the first run's last row."""
    if self.cache is not None and self.index:
        self.cache[0][:, :, key.shape[TOKENS] - 1] = 0
    return right(self, query, key, value, spec)


right = CachedRun.attend


@pytest.mark.parametrize("wrong", [late, stale])
def test_a_cache_off_by_a_row_is_found(wrong: Any) -> None:
    whole = decoder_of(RUNS, cached=False).continued(PROMPTS, up_to(20))
    cached = decoder_of(RUNS, cached=True)
    with patch.object(CachedRun, "attend", wrong):
        found = cached.continued(PROMPTS, up_to(20))
    assert found != whole
    assert found[1].logs != whole[1].logs


def test_a_row_ends_with_the_sequence() -> None:
    (row,) = decoder_of(RUNS, cached=True).continued({0: PROMPTS[1]}, greedy).values()
    assert len(row.tokens) == 64 - 20
    with pytest.raises(ConfigError, match=r"64 tokens leaves no place for a token in data\.sequence=64"):
        decoder_of(RUNS, cached=True).continued({0: [1] * 64}, greedy)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "usual": ({"bits": "usual"}, "bits.kind=usual has kernels by the number of rows"),
    "grains alone": ({"bits": {"kind": "layout-free", "samples": 1}}, "bits.samples=1 keeps grains alone"),
    "bf16": ({"precision": "bf16"}, "precision="),
    "experts": (
        {"model": MODELS["llama"] | {"experts": {"count": 4, "per_token": 2}}},
        "model.experts.count=4 gives experts as many rows as all tokens choose",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_without_the_promise_are_refused_by_name(name: str) -> None:
    changes, text = REFUSED[name]
    run = {"model": MODELS["gpt2"], "data": {"sequence": 64}, "batch": {"global": 8}, "bits": "layout-free"}
    with pytest.raises(ConfigError, match=text):
        require_exact(parse_config(run | changes), "--exact")
