"""A context's sends follow the formula, and a plan records a run's sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import rows_of
from meshwright.config import Config
from meshwright.planner.plan.recorder import Kernel, Recorder, Start, WaitFor
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from tests.harness import build, counted_step, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.context import CUT, ONE_D, config_for
from tests.workers import run_ranks

B, T, H, E, L = 4, 24, 24, 8, 2
"""Sizes of config_for's microbatch; E bytes a number."""


def sent(mesh: Mesh, config: Config) -> dict[str, tuple[int, int]]:
    """Return calls and bytes over the context axis, by verb, of one microbatch."""
    parts = build(config, mesh)
    [batch, *_] = parts.microbatches(rows_of(global_batch(config, 0), slice(0, config.replica_batch)))
    mesh.ledger.traffic.clear()
    forward_and_backward(parts, batch, {"labels": 1.0}, final=False)
    return over_context(mesh)


def over_context(mesh: Mesh) -> dict[str, tuple[int, int]]:
    traffic = mesh.ledger.traffic.items()
    return {verb: (entry.calls, entry.sent_bytes) for (axis, verb), entry in traffic if axis == "context"}


def run(config: Config) -> list[dict[str, tuple[int, int]]]:
    return run_ranks(sent, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)


@pytest.mark.parametrize("tensor", [None, ONE_D, CUT], ids=["none", "1-D", "cut"])
@pytest.mark.parametrize("size", [2, 3])
def test_ulysses_sends_eight_activations_a_layer(size: int, tensor: dict[str, Any] | None) -> None:
    heads = 1 if tensor is None else tensor["size"]
    each = B * T // size * H // heads * E
    for told in run(config_for("gpt2", {"size": size}, layout={"tensor": tensor or {"kind": "none"}})):
        assert told == {"all_to_all": (8 * L, 8 * L * each * (size - 1) // size)}


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_sends_blocks_forward_and_with_their_gradients_back(size: int) -> None:
    block = 2 * B * T // size * H * E
    for told in run(config_for("gpt2", {"size": size, "kind": "ring"})):
        assert told == {"send": (L * (3 * size - 2), L * (3 * size - 2) * block)}


def test_a_block_comes_under_the_product_before_it() -> None:
    """In a recorded layer, every block and the previous block's gradients start before a product, and the wait is after
    this product. Only the last send of gradients home has no such product."""
    recorder = Recorder()
    mesh = planned_mesh(Grid((("context", 3),)), 1, ("context",), "cuda", recorder.started)
    inputs = [torch.empty(1, 2, 12, 4, device="meta", requires_grad=True) for _ in range(3)]
    with recorder.program(Ledger()) as made:
        out = RingAttention(mesh).attend(*inputs, AttentionSpec(causal=True))
        torch.autograd.grad(out.sum(), inputs)
    under: list[bool] = []
    products: dict[int, int] = {}
    num_products = 0
    for event in made().events:
        match event:
            case Kernel(kind="product"):
                num_products += 1
            case Start():
                products[event.number] = num_products
            case WaitFor():
                under.append(num_products > products[event.number])
    assert under == [True] * (2 + 2 + 2) + [False]


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_a_planned_rank_sends_what_a_rank_sends(kind: str) -> None:
    config = config_for("gpt2", {"size": 2, "kind": kind}, batch={"global": 4, "micro": 4})
    for rank, told in enumerate(run(config)):
        assert told == over_context(counted_step(config, rank).mesh)
