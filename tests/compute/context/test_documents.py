"""Documents that share a row attend as separate documents: float64, outputs and gradients to 1e-12, under every
context. A changed document changes no bit outside of this document. A ring sends the blocks that some document
needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.bits.blocks import Blocks
from meshwright.compute.bits.runs import GatheredRing, RunsOfQueries
from meshwright.compute.context import kernels
from meshwright.compute.context.context import Context, Ulysses
from meshwright.compute.context.documents import (
    BLOCK,
    attend_at_once,
    attend_by_document,
    blocks_of,
    lengths_of,
)
from meshwright.compute.context.kernels import CpuKernel, Efficient, Flash, Kernel, kernel_of
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.training.on_device import AsOnDevice
from tests.compute.context.documents import LENGTHS, SOLO, E, T, operands, starts_of
from tests.workers import run_ranks


def one_by_one(mesh: Mesh) -> list[Tensor]:
    """Return the output, dQ, dK and dV of each document by itself."""
    inputs, gradient = operands()
    results = [torch.empty_like(x) for x in (gradient, *inputs)]
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
            at = (slice(row, row + 1), slice(None), slice(end - length, end))
            own = [x[at].clone().requires_grad_() for x in inputs]
            out = F.scaled_dot_product_attention(*own, is_causal=True, scale=0.3, enable_gqa=True)
            for result, x in zip(results, (out.detach(), *torch.autograd.grad(out, own, gradient[at])), strict=True):
                result[at] = x
    return results


KERNELS: dict[str, Kernel] = {
    "cpu": CpuKernel(), "tiles": Kernel(), "flash": Flash(), "efficient": Efficient(),
}  # fmt: skip
WAYS = {
    "whole": 1, "ulysses": 2, "ring cpu": 2, "ring cpu of 3": 3, "ring tiles": 4, "ring flash": 2, "ring efficient": 3,
    "gathered": 2,
}  # fmt: skip
"""Contexts, each with a number of ranks."""


def context_of(way: str, mesh: Mesh) -> Context:
    match way.split():
        case ["whole"]:
            return Context()
        case ["ulysses"]:
            return Ulysses(mesh)
        case ["gathered"]:
            gathered = GatheredRing(mesh)
            gathered.heads = RunsOfQueries(Blocks(head_parts=2, exact=True), 4)
            return gathered
        case ["ring", kernel, *_]:
            ring = RingAttention(mesh)
            ring.kernel_for = lambda *_: KERNELS[kernel]  # type: ignore[method-assign]
            return ring
    raise AssertionError(way)


def stand_in() -> None:
    """Replace a GPU's kernels by functions on CPUs with the same arguments and results."""

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float) -> Any:
        out, sums, _ = Kernel().attend(q, k, v, None, causal, scale)
        return out, sums, None, None, q.shape[2], k.shape[2], torch.tensor([1, 2]), torch.tensor(3), out.new_empty(0)

    def flash_back(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ends_q: None, ends_k: None,
        most_q: int, most_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> Any:  # fmt: skip
        assert (most_q, most_k, seed.tolist(), int(offset)) == (q.shape[2], k.shape[2], [1, 2], 3)
        assert sums.is_contiguous(), "the kernel reads l by its own strides"
        return Kernel().gradients(gradient, q, k, v, kernels.Attended(out, sums), None, causal, scale)

    def efficient(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants: bool, dropout: float, causal: bool, *, scale: float
    ) -> Any:
        assert wants
        assert q.shape[1] == k.shape[1]
        out, sums, _ = Kernel().attend(q, k, v, bias, causal, scale)
        return out, F.pad(sums, (0, -q.shape[2] % 32), value=-7.0), torch.tensor(1), torch.tensor(2)

    def efficient_back(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor,
        seed: Tensor, offset: Tensor, dropout: float, wants: list[bool], causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert sums.shape[2] % 32 == 0
        assert sums[:, :, q.shape[2] :].isposinf().all()
        whole = kernels.Attended(out, sums[:, :, : q.shape[2]])
        return *Kernel().gradients(gradient, q, k, v, whole, bias, causal, scale), None

    # A rank's process has torch to itself, and ends with the test.
    torch.ops.aten._scaled_dot_product_flash_attention = flash
    torch.ops.aten._scaled_dot_product_flash_attention_backward = flash_back
    torch.ops.aten._scaled_dot_product_efficient_attention = efficient
    torch.ops.aten._scaled_dot_product_efficient_attention_backward = efficient_back


def attended(mesh: Mesh, way: str, changed: Sequence[tuple[int, int, int]] = ()) -> tuple[Tensor, ...]:
    """Return this rank's tokens of the output, dQ, dK and dV, and the positions of these tokens. The tokens of
    `changed`, each (row, from, to), have other queries, keys, values and gradients."""
    if way.rsplit(maxsplit=1)[-1] in ("flash", "efficient"):
        stand_in()
    inputs, gradient = operands()
    for row, first, last in changed:
        for x in (*inputs, gradient):
            x[row, :, first:last] = x[row, :, first:last].flip(-1) * 3 + 1
    context = context_of(way, mesh)
    places = context.positions(0, T // mesh.size("context"), torch.device("cpu"))
    mine = [x[:, :, places].clone().requires_grad_() for x in inputs]
    out = context.attend(*mine, AttentionSpec(causal=True, scale=0.3, documents=starts_of(LENGTHS)))
    return out.detach(), *torch.autograd.grad(out, mine, gradient[:, :, places]), places


def together(way: str, *changed: tuple[int, int, int]) -> list[Tensor]:
    results = run_ranks(attended, Grid((("context", WAYS[way]),)), way, changed, forked=True)
    whole = [torch.empty(*x.shape[:2], T, E, dtype=x.dtype) for x in results[0][:-1]]
    for *parts, places in results:
        for tensor, part in zip(whole, parts, strict=True):
            tensor[:, :, places] = part
    return whole


@pytest.mark.parametrize("way", WAYS)
def test_documents_attend_as_each_alone(way: str) -> None:
    [expected] = run_ranks(one_by_one, SOLO)
    for name, actual, alone in zip(("output", "dQ", "dK", "dV"), together(way), expected, strict=True):
        error = (actual - alone).norm() / alone.norm()
        assert error <= 1e-12, f"{name}: {error}"


@pytest.mark.parametrize("way", WAYS)
def test_what_changes_in_a_document_changes_no_bit_outside_it(way: str) -> None:
    """Documents of 42, 48, 8, 1 and 4 tokens change; outside of these, every bit of output and gradients stays."""
    changed = [(0, 6, 48), (1, 0, 48), (2, 16, 24), (3, 30, 31), (4, 24, 28)]
    outside = torch.ones(len(LENGTHS), T, dtype=torch.bool)
    for row, first, last in changed:
        outside[row, first:last] = False
    for before, after in zip(together(way), together(way, *changed), strict=True):
        per_token = (before != after).transpose(1, 2).flatten(2).any(-1)
        assert not per_token[outside].any()
        assert per_token[~outside].any(), "what changed is seen"


def packed(mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of one kernel for all rows, and document by document."""
    (q, k, v), _ = operands()
    starts = starts_of(LENGTHS)

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, *how: Any, scale: float) -> list[Tensor]:
        """Attend as a varlen kernel: tokens [B T, A, E], the documents' ends, the longest document."""
        most, most_keys, dropout, causal, debug = how
        assert (dropout, causal, debug) == (0.0, True, False)
        assert ends.dtype == torch.int32
        lengths = ends.diff().tolist()
        assert most == most_keys == max(lengths)
        assert torch.equal(ends, key_ends)
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        out = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True, scale=scale, enable_gqa=True
            )
            for part in parts
        ]
        return [torch.cat(out, 1).transpose(0, 1)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=0.3, enable_gqa=True)

    at_once = attend_at_once(flash, starts, q, k, v, AttentionSpec(causal=True, scale=0.3))
    return [(at_once, attend_by_document(attend, starts, q, k, v))]


def test_one_kernel_for_all_rows_is_told_where_documents_begin() -> None:
    [[(at_once, one_by_one)]] = run_ranks(packed, SOLO)
    assert (at_once - one_by_one).norm() <= 1e-12 * one_by_one.norm()


def test_short_documents_go_into_blocks() -> None:
    lengths = [*[40] * 5, 3 * BLOCK, 1, 2]
    blocks = blocks_of(lengths)
    assert [length for block in blocks for length in block] == lengths
    assert blocks == [[40] * 3, [40] * 2, [3 * BLOCK], [1, 2]]
    x, masks = torch.zeros(1, 1, 3, 1), list[Tensor]()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool) -> Tensor:
        masks.append(mask)
        return v

    attend_by_document(attend, starts_of([[2, 1]]), x, x, x)
    assert [(mask == 0).tolist() for mask in masks] == [
        [[True, False, False], [True, True, False], [False, False, True]]
    ]
    assert lengths_of(starts_of(LENGTHS)) == [list(row) for row in LENGTHS]


@pytest.mark.parametrize(
    "lengths, steps",
    [((8,) * 8, [0]), ((4,) * 16, [0]), ((6,) * 10 + (4,), [0, 1, 3]), ((64,), [0, 1, 2, 3]), ((40, 24), [0, 1, 2, 3])],
)
def test_a_ring_takes_the_steps_that_some_document_needs(lengths: Sequence[int], steps: list[int]) -> None:
    """A ring of 4 ranks has chunks of 8 tokens. Documents that end with chunks need no other rank."""
    mesh = planned_mesh(Grid((("context", 4),)), 1, ("context",), "cpu")
    assert RingAttention(mesh).steps(starts_of([lengths]).numpy(), None) == steps


def sent(mesh: Mesh, lengths: Sequence[int]) -> int:
    shape = (1, 1, 64 // mesh.size("context"), E)
    inputs = [torch.ones(shape, device=mesh.device, requires_grad=True) for _ in range(3)]
    out = RingAttention(mesh).attend(*inputs, AttentionSpec(causal=True, documents=starts_of([lengths])))
    torch.autograd.grad(out.sum(), inputs)
    return sum(entry.sent_bytes for entry in mesh.ledger.traffic.values())


@pytest.mark.parametrize("lengths, sends", [((8,) * 8, 0), ((6,) * 10 + (4,), 3 * 2), ((64,), 3 * 3)])
def test_a_ring_sends_blocks_of_those_steps(lengths: Sequence[int], sends: int) -> None:
    """Keys and values are sent forward and again backward, and gradients are sent home: each once a step."""
    block = 2 * (64 // 4) * E * 4
    assert run_ranks(sent, Grid((("context", 4),)), lengths) == [sends * block] * 4


@pytest.mark.parametrize(
    "dtype, masked, device, attention, kernel",
    [
        (torch.bfloat16, False, "cuda", "fused", Flash),
        (torch.bfloat16, True, "cuda", "fused", Efficient),
        (torch.float32, False, "cuda", "fused", Efficient),
        (torch.float64, False, "cuda", "fused", Kernel),
        (torch.bfloat16, False, "cuda", "torch", Kernel),
        (torch.bfloat16, True, "cpu", "fused", CpuKernel),
    ],
)
def test_a_ring_on_a_device_takes_its_fused_kernel(
    dtype: torch.dtype, masked: bool, device: str, attention: Any, kernel: type[Kernel]
) -> None:
    """On meta tensors, kernels return the shapes of a GPU's kernels; a ring of 4 holds no scores."""
    length, heads, keys, width = 2048, 8, 2, 64
    q, k, v = (
        torch.empty(1, count, length, width, dtype=dtype, device="meta", requires_grad=True)
        for count in (heads, keys, keys)
    )
    mask = torch.ones(1, 1, 1, 4 * length, dtype=torch.bool, device="meta") if masked else None
    mesh = planned_mesh(Grid((("context", 4),)), 1, ("context",), device)
    with AsOnDevice(device, attention), LiveBytes() as live:
        assert type(kernel_of(q, k, v, masked, device)) is kernel
        out = RingAttention(mesh).attend(q, k, v, AttentionSpec(not masked, seen=mask))
        gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    scores = length * length * heads * 4
    assert (live.peak < scores / 2) == (kernel is not Kernel)
