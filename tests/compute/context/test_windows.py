"""Windows: each token sees the last W keys alone, equal to a plain mask of T x T in float64 to 1e-12 under every
context, with and without documents; keys outside of the window are not computed, sent or kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.context import documents
from meshwright.compute.context.context import Context
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.training.on_device import AsOnDevice
from tests.compute.context.documents import LENGTHS, SOLO, E, T, operands, starts_of
from tests.compute.context.ways import WAYS, context_of
from tests.workers import run_ranks

WINDOWS = (1, 5, 16, T - 1, 100)


def attended(mesh: Mesh, way: str, block: int) -> list[tuple[Tensor, ...]]:
    """Return this rank's tokens of the output, dQ, dK and dV with each window, without and with documents, and the
    tokens' positions."""
    documents.BLOCK = block  # a rank's process has the package to itself
    inputs, gradient = operands()
    context, found = context_of(way, mesh), []
    places = context.positions(0, T // mesh.size("context"), torch.device("cpu"))
    for starts in (None, starts_of(LENGTHS)):
        for window in WINDOWS:
            mine = [x[:, :, places].clone().requires_grad_() for x in inputs]
            spec = AttentionSpec(causal=True, window=window, scale=0.3, documents=starts)
            out = context.attend(*mine, spec)
            found.append((out.detach(), *torch.autograd.grad(out, mine, gradient[:, :, places]), places))
    return found


def masked(mesh: Mesh) -> list[tuple[Tensor, ...]]:
    """Return the same tensors by a plain mask."""
    inputs, gradient = operands()
    inputs, found = [x.requires_grad_() for x in inputs], []
    for starts in (None, starts_of(LENGTHS)):
        for window in WINDOWS:
            seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)
            if starts is not None:
                seen = (seen & (starts[:, :, None] == starts[:, None, :])).unsqueeze(1)
            out = F.scaled_dot_product_attention(*inputs, seen, scale=0.3, enable_gqa=True)
            found.append((out.detach(), *torch.autograd.grad(out, inputs, gradient)))
    return found


@cache
def reference() -> list[list[tuple[Tensor, ...]]]:
    return run_ranks(masked, SOLO)


@pytest.mark.parametrize("way, block", [*((way, 4) for way in WAYS), ("whole", 128), ("ring 2", 128)])
def test_a_window_is_a_mask(way: str, block: int) -> None:
    """A run has at least `block` tokens: a row of 48 has 12 runs, or one."""
    [expected] = reference()
    results = run_ranks(attended, Grid((("context", WAYS[way].ranks),)), way, block, forked=True)
    for number, case in enumerate(expected):
        for index, tensor in enumerate(case):
            together = torch.empty_like(tensor)
            for found in results:
                together[:, :, found[number][-1]] = found[number][index]
            error = (together - tensor).norm() / tensor.norm().clamp(min=1)  # a window of 1 has no dQ and no dK
            assert error <= 1e-12, f"case {number}, {('output', 'dQ', 'dK', 'dV')[index]}: {error}"


@pytest.mark.parametrize(
    "window, steps", [(1, [0]), (2, [0, 1, 3]), (9, [0, 1, 3]), (10, [0, 1, 2, 3]), (64, [0, 1, 2, 3])]
)
def test_a_ring_leaves_out_the_steps_outside_of_the_window(window: int, steps: list[int]) -> None:
    """A ring of 4 ranks has chunks of 8 tokens."""
    mesh = planned_mesh(Grid((("context", 4),)), 1, ("context",), "cpu")
    ring, query = RingAttention(mesh), torch.empty(1, 1, 16, E, device="meta")
    spec = AttentionSpec(causal=True, window=window).within(64)
    starts = ring.starts(query, spec, None)
    assert (list(range(4)) if starts is None else ring.steps(starts, window)) == steps


@pytest.mark.parametrize("rows", [None, LENGTHS])
def test_one_kernel_for_all_rows_is_told_the_window(rows: Sequence[Sequence[int]] | None) -> None:
    (q, k, v), _ = operands()
    told: dict[str, Any] = {}

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, **how: Any) -> list[Tensor]:
        told.update(how, lengths=ends.diff().tolist())
        return [q]

    spec = AttentionSpec(causal=True, window=5, scale=0.3)
    documents.attend_at_once(flash, None if rows is None else starts_of(rows), q, k, v, spec)
    lengths = [T] * len(q) if rows is None else [length for row in rows for length in row]
    assert told == {"scale": 0.3, "window_size_left": 4, "window_size_right": 0, "lengths": lengths}


def test_a_long_sequence_holds_no_mask_of_all_its_tokens() -> None:
    length, window = 2**14, 2**8
    q, k, v = (torch.empty(1, 2, length, 16, device="meta", requires_grad=True) for _ in range(3))
    with AsOnDevice("cpu", "fused"), LiveBytes() as live:
        out = Context().attend(q, k, v, AttentionSpec(causal=True, window=window))
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert live.peak < length * length / 8, "a mask of a bit a pair"


def test_a_cache_keeps_the_window() -> None:
    cache, window = KeyValueCache(), 4
    x = torch.arange(10.0)[None, None, :, None]
    seen, _ = cache.extend(0, x[:, :, :6], x[:, :, :6], window)
    assert seen.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    for token in range(6, 10):
        seen, _ = cache.extend(0, x[:, :, token : token + 1], x[:, :, token : token + 1], window)
        assert seen.flatten().tolist() == list(range(token - 3, token + 1))
        assert cache.layers[0][0].untyped_storage().nbytes() == 3 * 4
        assert cache.num_tokens == token + 1


def test_a_spec_that_cannot_be_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 1)
    for wrong in ({"window": 4}, {"documents": x}, {"causal": True, "bias": x}, {"causal": True, "window": 0}):
        with pytest.raises(ValueError, match="attention: "):
            AttentionSpec(**wrong)
    with pytest.raises(ValueError, match="`seen` with `bias`"):
        _ = AttentionSpec(seen=x, bias=x).mask
    dropped, biased = AttentionSpec(causal=True, dropout=0.5), AttentionSpec(bias=x)
    for spec, name in ((dropped, "dropout"), (biased, "bias")):
        with pytest.raises(ValueError, match=f"a ring does not know `{name}`"):
            spec.only("causal", by="a ring")
    replace(dropped, dropout=0.0).only("causal", by="a ring")
