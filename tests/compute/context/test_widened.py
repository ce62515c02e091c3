"""Attention of halves with float32 operands in the backward kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compute.context.context import Heads, WidenedHeads
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.context.widened import attend_widened
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def gradients_of_attention(mesh: Mesh, masked: bool) -> list[tuple[Tensor, Tensor]]:
    """Return output and dQ of one attention in bf16, with a widened backward kernel and with bf16's own."""
    torch.manual_seed(2)
    q, gradient = halves(2, 3, 40, 16).requires_grad_(), halves(2, 3, 40, 16)
    mask = torch.rand(2, 1, 1, 40) > 0.3 if masked else None

    def of(attention: Any) -> list[Tensor]:
        out = attention(q, q, q, mask, 0.0, not masked)
        return [out, torch.autograd.grad(out, q, gradient)[0]]

    return list(zip(of(attend_widened), of(torch.nn.functional.scaled_dot_product_attention), strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_goes_backward_in_float32(masked: bool) -> None:
    [((out, own_out), (dq, own_dq))] = run_ranks(gradients_of_attention, Grid((("data", 1),)), masked)
    assert torch.equal(out, own_out)  # one kernel
    assert dq.dtype == torch.bfloat16
    assert not torch.equal(dq, own_dq)
    assert (dq - own_dq).norm() <= 2**-7 * own_dq.norm()


def test_a_window_goes_backward_in_float32() -> None:
    """Blocks of a window have masks of two dims."""
    torch.manual_seed(2)
    q, gradient, found = halves(2, 3, 200, 16).requires_grad_(), halves(2, 3, 200, 16), []
    for heads in (WidenedHeads(), Heads()):
        out = heads.attend(q, q, q, AttentionSpec(causal=True, window=5))
        found.append((out, *torch.autograd.grad(out, q, gradient)))
    (out, dq), (own_out, own_dq) = found
    assert torch.equal(out, own_out)
    assert (dq - own_dq).norm() <= 2**-7 * own_dq.norm()


def test_attention_without_a_fused_kernel_is_in_float32() -> None:
    torch.manual_seed(2)
    q, bias = halves(2, 3, 8, 16).requires_grad_(), torch.randn(1, 3, 8, 8, requires_grad=True)
    out = attend_widened(q, q, q, bias)
    wide = q.float()
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(wide, wide, wide, bias).bfloat16())
    out.sum().backward()
    assert bias.grad is not None


def test_other_dtypes_are_left_alone() -> None:
    x = torch.randn(1, 1, 6, 4, dtype=torch.float64)
    assert torch.equal(attend_widened(x, x, x), torch.nn.functional.scaled_dot_product_attention(x, x, x))
