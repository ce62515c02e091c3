"""Two runs of one config give the same bits, with several threads a rank and in single and half precision.

In float64 torch's CPU kernels add in one order; in float32 some kernels let threads add in any order.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from meshwright.compute.parameters.writes import RowGradient
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.norm import gradient_norm
from tests.harness import build
from tests.oracle.run import train_step
from tests.workers import run_ranks

ONE = Grid((("data", 1),))
ROUNDS = 100

LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {},
    "megatron": {"tensor": {"kind": "megatron", "size": 2}},
    "megatron, sequence": {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}},
    "tesseract": {"tensor": {"kind": "tesseract", "q": 2, "d": 1}},
    "sub-graphs": {"tensor": {"kind": "subgraph", "size": 2, "common": "all", "branch": "attention-core"}},
    "one sub-graph's common": {"tensor": {"kind": "subgraph", "size": 2, "common": "one", "branch": "block"}},
    "replicas": {"data": {"size": 2, "sync": "zero1"}},
    "stages": {"pipeline": {"size": 2, "schedule": "message-driven"}},
}

SINGLE, HALF = {"level": "O0", "dtype": "float32"}, {"level": "O2", "dtype": "bf16"}

CASES = [("serial", SINGLE), ("megatron, sequence", SINGLE), ("one sub-graph's common", HALF)]
ONLY_LONG = [(layout, level) for layout in LAYOUTS for level in (SINGLE, HALF) if (layout, level) not in CASES]


def config_for(layout: str, precision: dict[str, str]) -> Config:
    """Return a config with 512 or more tokens a microbatch, from few words: all threads add rows of the same words at
    once."""
    tree = {
        "model": {
            "family": "gpt2", "layers": 2, "hidden": 128, "heads": 4, "positions": 64, "vocabulary": 300,
            "vocabulary_multiple": 12, "dropout": 0.1, "tied": True,
        },
        "data": {"sequence": 64},
        "batch": {"global": 32, "micro": 16 // LAYOUTS[layout].get("data", {}).get("size", 1)},
        "layout": LAYOUTS[layout],
        "precision": precision,
        "optimizer": {"lr": 1e-2, "clip": 0.5},
        "steps": 3,
    }  # fmt: skip
    return parse_config(tree)


def digests(mesh: Mesh, config: Config) -> list[str]:
    """Return hashes of each step's loss, gradients and gradient norm, and of the last weights, on this rank."""
    parts, found = build(config, mesh), []
    for step in range(config.steps):
        torch.manual_seed(1000 * step + mesh.rank)
        loss, gradients = train_step(parts, step)
        found += [loss.hex(), float(gradient_norm(parts.strategy.slots, mesh)).hex()]
        found += [sha256(part) for held in gradients.values() for part in held.values()]
    return [*found, *(sha256(parameter) for parameter in parts.model.parameters())]


def sha256(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).numpy().data).hexdigest()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout, precision", [*CASES, *[pytest.param(*case, marks=pytest.mark.long) for case in ONLY_LONG]],
    ids=lambda value: value if isinstance(value, str) else value["dtype"],
)  # fmt: skip
def test_two_runs_have_the_same_bits(layout: str, precision: dict[str, str]) -> None:
    config = config_for(layout, precision)
    first, second = (
        run_ranks(digests, Grid(config.layout.axes), config, token_axes=config.layout.token_axes, threads=2)
        for _ in range(2)
    )
    assert first == second


def varieties(mesh: Mesh, dtype: str) -> int:
    """Return the number of different sums of the same rows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (4096,), generator=generator)
    rows = torch.randn(4096, 256, generator=generator).to(getattr(torch, dtype))
    found = set()
    for _ in range(ROUNDS):
        table = torch.zeros(50, 256, dtype=rows.dtype)
        RowGradient(ids, rows, "cpu")(table, 1)
        found.add(sha256(table))
    wanted = torch.zeros(50, 256, dtype=torch.float64).index_add_(0, ids, rows.double())
    assert float((table.double() - wanted).norm() / wanted.norm()) < {"float32": 1e-6, "bfloat16": 0.1}[dtype]
    return len(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_added_in_one_order(dtype: str) -> None:
    assert run_ranks(varieties, ONE, dtype, threads=4) == [1]
