"""Runs with layers as graphs, next to runs without: for tests of `compile`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.compute.tensor import graphs
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.step import train_step
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.pipeline import WHOLE
from tests.oracle.run import check, train
from tests.oracle.tensor import config_for
from tests.rehearsal.fake_cuda import compiler
from tests.workers import run_ranks

WARNINGS = [  # of torch's compiler by itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

OLD = torch.__version__.startswith("2.11")
needs_inductor = pytest.mark.skipif(
    OLD or compiler() is None,
    reason="Inductor needs a C++ compiler on CPUs; that of torch 2.11 takes attention's sums in float64 for float32's",
)
MEGATRON, TESSERACT = {"kind": "megatron", "size": 2}, {"kind": "tesseract", "q": 2, "d": 1}
ONE = Grid((("data", 1),))


def with_blocks(config: Config, **changes: Any) -> Config:
    """Return the config with `compile: blocks`, and with other settings of axes."""
    tree = config.model_dump(mode="json", by_alias=True)
    for axis, settings in changes.items():
        tree["layout"][axis] |= settings
    return parse_config(tree | {"compile": "blocks"})


def counted(mesh: Mesh, config: Config, backend: str = "aot_eager") -> tuple[Any, int, Counter[str]]:
    """Return the result of the oracle's `train`, the number of graphs, and the breaks by reason. Each call needs a
    separate process."""
    graphs.BACKEND = backend
    result = train(mesh, config)
    return result, counters["stats"]["unique_graphs"], Counter(counters["graph_break"])


def run(config: Config, backend: str = "aot_eager") -> list[tuple[Any, int, Counter[str]]]:
    results: list[tuple[Any, int, Counter[str]]] = run_ranks(
        counted, config.grid, config, backend, token_axes=config.layout.token_axes, forked=True
    )
    return results


def equals(config: Config, one: Any, backend: str = "aot_eager") -> tuple[int, Counter[str]]:
    """Compare with one device without graphs; return the graphs and breaks of all ranks."""
    results = run(config, backend)
    check([result for result, _, _ in results], one)
    return results[-1][1], results[-1][2]


def some(names: Iterable[str], often: Sequence[str]) -> list[Any]:
    """Return the names as parameters. Names outside of `often` are marked long: making a graph takes seconds."""
    return [name if name in often else pytest.param(name, marks=pytest.mark.long) for name in names]


LAYOUTS: dict[str, dict[str, Any]] = {
    **{sync: {"data": {"size": 2, "sync": sync}} for sync in ("allreduce", "zero1", "zero2", "zero3")},
    "megatron": {"tensor": MEGATRON},
    "sequence-parallel": {"tensor": MEGATRON | {"sequence_parallel": True}},
    "tesseract": {"tensor": TESSERACT},
    "ring": {"context": {"size": 2, "kind": "ring"}},
    "ulysses": {"context": {"size": 2, "kind": "ulysses"}},
    "megatron and zero3": {"tensor": MEGATRON, "data": {"size": 2, "sync": "zero3"}},
}


def steps(mesh: Mesh, config: Config) -> list[float]:
    graphs.BACKEND = "aot_eager"
    parts = build(config, mesh)
    return [train_step(parts, BATCHES["gpt2"](config, step), step).loss for step in range(3)]


def losses(model: dict[str, Any] | None = None, **changes: Any) -> list[float]:
    """Return the losses of three steps. `model`: changed fields of the model."""
    tree = config_for("gpt2", WHOLE, **changes).model_dump(mode="json", by_alias=True)
    found: list[float]
    (found,) = run_ranks(steps, ONE, parse_config(tree | {"model": tree["model"] | (model or {})}), forked=True)
    return found
