"""O2 adds up the gradients of microbatches in float32: a bf16 sum of equal terms stops growing after 256 terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compute.model import Batch
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.run import train_step
from tests.workers import run_ranks

TERMS = 400
"""Equal microbatches of a replica. A bf16 sum of 400 terms is a fifth too small."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {},
    "zero1": {"layout": {"data": {"size": 2, "sync": "zero1"}}},
    "zero3": {"layout": {"data": {"size": 2, "sync": "zero3"}}},
    "stages": {"layout": {"pipeline": {"size": 2, "schedule": "message-driven"}}},
    "megatron": {"layout": {"tensor": {"kind": "megatron", "size": 2, "sequence_parallel": True}}},
    "offload": {"memory": {"offload": {"to": "host", "bucket": 1024}}},
    "tesseract": {"layout": {"tensor": {"kind": "tesseract", "q": 2, "d": 1}}},
    "sub-graphs": {"layout": {"tensor": {"kind": "subgraph", "size": 2, "common": "one", "branch": "block"}}},
}

ONLY_LONG = {"zero1", "zero3", "megatron", "offload", "tesseract", "sub-graphs"}
CASES = [pytest.param(name, marks=pytest.mark.long) if name in ONLY_LONG else name for name in LAYOUTS]

Gradients = dict[str, dict[tuple[int, ...], torch.Tensor]]


def config_for(layout: str, terms: int, **precision: str) -> Config:
    """Return a tied config with biases: gradients of look-ups, heads, linears and sums."""
    changes = LAYOUTS[layout]
    replicas = changes.get("layout", {}).get("data", {}).get("size", 1)
    rows = {"tesseract": 2}.get(layout, 1)
    tree = {
        "model": {
            "family": "gpt2", "layers": 2 if layout == "stages" else 1, "hidden": 16, "heads": 2, "positions": 8,
            "vocabulary": 300, "vocabulary_multiple": 12, "dropout": 0.0, "tied": True,
        },
        "data": {"sequence": 8},
        "batch": {"global": terms * replicas * rows, "micro": rows},
        "precision": {"level": "O2", "dtype": "bf16"} | precision,
        "optimizer": {"clip": None},
        "steps": 1,
    } | changes  # fmt: skip
    return parse_config(tree)


def alike(config: Config, step: int) -> Batch:
    """Return a batch of equal rows."""
    one = global_batch(config.model_copy(update={"batch": config.batch.model_copy(update={"global_": 1})}), step)
    return {name: rows.expand(config.batch.global_, *rows.shape[1:]).contiguous() for name, rows in one.items()}


def gradients_of(mesh: Mesh, config: Config) -> tuple[Gradients, set[torch.dtype]]:
    """Return a step's gradients, and the dtypes of the sums."""
    _, gradients = train_step(build(config, mesh), 0, alike(config, 0))
    return gradients, {part.dtype for held in gradients.values() for part in held.values()}


def run(config: Config) -> list[tuple[Gradients, set[torch.dtype]]]:
    grid = Grid(config.layout.axes)
    return run_ranks(gradients_of, grid, config, token_axes=config.layout.token_axes)


def errors(config: Config) -> dict[str, float]:
    """Return each gradient's relative distance from the gradient of float32 weights and all rows at once."""
    one = config_for("serial", 1, level="O0", dtype="float32")
    ((expected, _),) = run(one.model_copy(update={"model": config.model}))
    found = {}
    results = run(config)
    for name, held in expected.items():
        (whole,) = held.values()
        actual = torch.full_like(whole, torch.nan)
        for mine, _ in results:
            for offsets, part in mine.get(name, {}).items():
                actual[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part.float()
        found[name] = float((actual - whole).norm() / whole.norm())
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", CASES)
def test_equal_terms_add_up(layout: str) -> None:
    """The sums are right to bf16's own precision: the error is the rounding of activations and of each term."""
    found = errors(config_for(layout, TERMS))
    assert max(found.values()) < 0.05, found


def test_stored_sums_stop_growing() -> None:
    """The paper's half-precision sums stop growing as well: `accumulate: stored` is a choice."""
    found = errors(config_for("serial", TERMS, accumulate="stored"))
    assert max(found.values()) > 0.2, found


@pytest.mark.parametrize(
    "terms, precision, summed_in",
    [
        (1, {}, {torch.bfloat16, torch.float32}),  # norms are float32 in any case
        (2, {}, {torch.float32}),
        (2, {"accumulate": "stored"}, {torch.bfloat16, torch.float32}),
        (2, {"dtype": "fp16"}, {torch.float32}),
    ],
)
def test_types(terms: int, precision: dict[str, str], summed_in: set[torch.dtype]) -> None:
    ((_, found),) = run(config_for("serial", terms, **precision))
    assert found == summed_in
