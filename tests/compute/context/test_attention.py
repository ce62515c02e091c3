"""Attention over cut sequences equals attention over whole sequences: float64, output and gradients to 1e-12."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.context.context import CutContext, Ulysses
from meshwright.compute.context.kernels import CpuKernel, Kernel
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

B, A, T, E = 3, 4, 24, 5

KINDS: dict[str, type[CutContext]] = {"ulysses": Ulysses, "ring": RingAttention}


def operands() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return Q, K, V, the output's gradient, and a mask [B, 1, 1, T] with rows of 1, a third and all of the tokens."""
    torch.manual_seed(5)
    tensors = [torch.randn(B, A, T, E, dtype=torch.float64) * 2 for _ in range(4)]
    mask = torch.arange(T) < torch.tensor([1, T // 3, T])[:, None]
    return tensors[:3], tensors[3], mask[:, None, None, :]


def cut(mesh: Mesh, kind: str, causal: bool, masked: bool, fuses: bool) -> tuple[Tensor, ...]:
    """Return this rank's tokens of the output, dQ, dK and dV, and the positions of these tokens."""
    (q, k, v), gradient, mask = operands()
    context = KINDS[kind](mesh)
    if isinstance(context, RingAttention):
        context.kernel_for = lambda *_: CpuKernel() if fuses else Kernel()  # type: ignore[method-assign]
    places = torch.tensor([place for run in context.runs(T) for place in run])
    assert torch.equal(places, context.positions(0, len(places), torch.device("cpu")))
    mine = [x[:, :, places].clone().requires_grad_() for x in (q, k, v)]
    out = context.attend(*mine, AttentionSpec(causal, scale=0.3, seen=mask if masked else None))
    return out.detach(), *torch.autograd.grad(out, mine, gradient[:, :, places]), places


def whole(mesh: Mesh, causal: bool, masked: bool) -> tuple[Tensor, ...]:
    operand, gradient, mask = operands()
    inputs = [x.requires_grad_() for x in operand]
    out = F.scaled_dot_product_attention(*inputs, mask if masked else None, 0.0, causal, scale=0.3)
    return out.detach(), *torch.autograd.grad(out, inputs, gradient)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("causal, masked", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("kind, fuses", [("ulysses", True), ("ring", True), ("ring", False)])
def test_equals_attention_over_whole_sequences(kind: str, fuses: bool, causal: bool, masked: bool, size: int) -> None:
    [expected] = run_ranks(whole, Grid((("context", 1),)), causal, masked)
    results = run_ranks(cut, Grid((("context", size),)), kind, causal, masked, fuses)
    seen = torch.cat([places for *_, places in results])
    assert torch.equal(seen.sort().values, torch.arange(T))
    for index, tensor in enumerate(expected):
        together = torch.empty_like(tensor)
        for *parts, places in results:
            together[:, :, places] = parts[index]
        error = (together - tensor).norm() / tensor.norm()
        assert error <= 1e-12, f"{('output', 'dQ', 'dK', 'dV')[index]}: {error}"


def test_causal_ranks_do_the_same_work() -> None:
    """Every rank has the same pairs of query and key in a step: half the rank's tokens by a whole block, or half of the
    diagonal block."""

    def pairs(ring: RingAttention, step: int) -> int:
        (piece,) = ring.pieces(step, 2, AttentionSpec(causal=True), None)
        all_pairs = (piece.queries.stop - piece.queries.start) * (piece.keys.stop - piece.keys.start)
        return all_pairs // 2 if piece.causal else all_pairs

    for size in (2, 3, 8):
        work = set()
        for index in range(size):
            ring = RingAttention.__new__(RingAttention)
            ring.size, ring.index = size, index
            work.add(tuple(pairs(ring, step) for step in range(size)))
        assert work == {(2,) * size}


def test_tiles_of_scores_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), gradient, _ = operands()
    kernel = Kernel()
    at_once = kernel.attend(q, k, v, None, True, 0.3)
    expected = kernel.gradients(gradient, q, k, v, at_once, None, True, 0.3)
    monkeypatch.setattr("meshwright.compute.context.kernels.TILE_ELEMENTS", B * A * T * 7)
    torch.testing.assert_close(kernel.attend(q, k, v, None, True, 0.3)[:2], at_once[:2])
    torch.testing.assert_close(kernel.gradients(gradient, q, k, v, at_once, None, True, 0.3), expected)
