"""Meshwright's GELU is torch's tanh form: values and gradients, also at the ends of slices and for a saturated gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from meshwright.compute.tensor.gelu import SLICE_ELEMENTS, gelu
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks


def both(mesh: Mesh, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return value and gradient of Meshwright's GELU in `dtype`, and of torch's in float64 (torch's tanh saturates to
    no gradient in float32)."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, SLICE_ELEMENTS // 2 + 7, generator=generator) * 4).to(dtype)
    x[0, :4] = torch.tensor([0.0, -60.0, 60.0, -7.5])
    dy = torch.randn(x.shape, generator=generator).to(dtype)

    def differentiated(function: Callable[[torch.Tensor], torch.Tensor], kind: torch.dtype) -> list[torch.Tensor]:
        leaf = x.detach().to(kind, copy=True).requires_grad_()
        y = function(leaf)
        y.backward(dy.to(kind))
        assert leaf.grad is not None
        return [y.detach().double(), leaf.grad.double()]

    return differentiated(gelu, dtype), differentiated(lambda x: F.gelu(x, approximate="tanh"), torch.float64)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    ((ours, reference),) = run_ranks(both, Grid((("data", 1),)), dtype)
    for mine, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
