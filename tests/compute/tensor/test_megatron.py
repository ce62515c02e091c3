"""1-D sends by the formulas of docs/tensor.md; dropout masks are the same between pairs, not inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compute.model import rows_of
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.rank_model import build_kit
from tests.harness import build, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.tensor import config_for
from tests.workers import run_ranks

B, T, H, E, L = 12, 12, 24, 8, 2
ROWS = B * T * H * E
"""Bytes of [B, T, H] in float64."""


def sent(mesh: Mesh, config: Config) -> dict[str, tuple[int, int]]:
    """Return calls and bytes over the tensor axis, by verb, of one microbatch."""
    parts = build(config, mesh)
    batch = rows_of(global_batch(config, 0), slice(0, B))
    mesh.ledger.traffic.clear()
    forward_and_backward(parts, batch, {"labels": 1.0}, final=False)
    traffic = mesh.ledger.traffic.items()
    return {verb: (entry.calls, entry.sent_bytes) for (axis, verb), entry in traffic if axis == "tensor"}


def run(tensor: dict[str, Any]) -> list[dict[str, tuple[int, int]]]:
    config = config_for("gpt2", tensor)
    return run_ranks(sent, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_with_whole_sequences(size: int) -> None:
    share = (size - 1) / size
    reduced = 2 * share * (ROWS * (4 * L + 2) + T * H * E)  # a block's four, the head's, two embeddings
    statistics = (size - 1) * B * T * 3 * E
    for told in run({"kind": "megatron", "size": size}):
        assert told == {"all_reduce": (4 * L + 3, reduced), "all_gather": (1, statistics)}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_with_cut_sequences(size: int) -> None:
    share = (size - 1) / size
    tables = T * H * E
    scattered = share * (ROWS * (4 * L + 2) + tables)
    gathered = share * (ROWS * (6 * L + 2) + tables) + (size - 1) * B * T * 3 * E
    for told in run({"kind": "megatron", "size": size, "sequence_parallel": True}):
        assert told == {"reduce_scatter": (4 * L + 3, scattered), "all_gather": (6 * L + 4, gathered)}


def draws(mesh: Mesh, config: Config) -> tuple[list[float], list[float], list[float]]:
    """Return random numbers between pairs, inside of a pair, and between pairs again."""
    kit = build_kit(config, mesh)
    torch.manual_seed(3)
    before = torch.rand(4).tolist()
    with kit.own_randomness(0.1):
        inside = torch.rand(4).tolist()
    return before, inside, torch.rand(4).tolist()


def test_each_rank_draws_its_own_inside_a_pair() -> None:
    config = config_for("gpt2", {"kind": "megatron", "size": 3})
    befores, insides, afters = zip(*run_ranks(draws, Grid(config.layout.axes), config), strict=True)
    assert len(set(map(tuple, befores))) == len(set(map(tuple, afters))) == 1
    assert len(set(map(tuple, insides))) == 3
    assert befores[0] != afters[0]
