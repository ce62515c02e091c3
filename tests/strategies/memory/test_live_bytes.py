"""The counter of live bytes, on a graph with known bytes."""

from __future__ import annotations

import torch

from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.memory.recompute import LiveBytes
from tests.workers import run_ranks

SIDE = 100
BYTES = 4 * SIDE * SIDE


def followed(mesh: Mesh) -> list[int]:
    """Return live and peak bytes after a product, after the product's exponential, and after the backward pass of
    both."""
    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    view = weight.detach()[1:]
    seen = []
    with LiveBytes() as live:
        y = weight @ weight.detach()
        view.t()
        seen += [live.live, live.peak]
        y = y.exp()
        seen += [live.live, live.peak]
        y.backward(torch.ones_like(y))  # ones, dL/d product, and dL/d weight
        seen += [live.live, live.peak]
        del y
        seen += [live.live, live.peak]
    return seen


def test_what_lives() -> None:
    (seen,) = run_ranks(followed, Grid((("data", 1),)))
    # exp keeps the result, and the product is freed
    assert [number / BYTES for number in seen] == [1, 1, 1, 2, 2, 4, 1, 4]
