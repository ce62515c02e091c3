"""Sub-graphs compute one device's numbers: every form of D&SP, alone and with all else that a layout may have."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.norm import gradient_norm
from meshwright.training.step import backward
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.run import check, run, train
from tests.oracle.subgraph import CASES, SYNCS, Case, label, subgraph
from tests.oracle.tensor import config_for, serial
from tests.workers import run_ranks

BRANCHES = ("attention-core", "attention", "block")
COMMONS = ("all", "one")
SHORT = 3


MODELS = ("gpt2", "untied", "bert", "megatron-bert", "vit")
ONLY_LONG = [case for case in product(MODELS, (2, 4), COMMONS, BRANCHES, (1, 2)) if case not in CASES]


@pytest.mark.parametrize(
    "case", [*CASES, *[pytest.param(case, marks=pytest.mark.long) for case in ONLY_LONG]], ids=label
)
def test_equals_serial(case: Case) -> None:
    model, size, common, branch, data = case
    check(run(config_for(model, subgraph(size, common, branch), data, steps=SHORT)), serial(model))


def with_sync(model: str, tensor: dict[str, Any], sync: str, data: int = 2) -> Config:
    layout = {"data": {"size": data, "sync": sync, "bucket": 8192}, "tensor": tensor}
    return config_for(model, tensor, data, layout=layout, steps=SHORT)


def train_each(mesh: Mesh, configs: list[Config]) -> list[Any]:
    return [train(mesh, config) for config in configs]


@pytest.mark.parametrize("common, data", [("all", 1), ("one", 2), pytest.param("all", 2, marks=pytest.mark.long)])
def test_every_sync(common: str, data: int) -> None:
    """With `common: one` half of the ranks have buckets without elements."""
    configs = [with_sync("gpt2", subgraph(2, common, "block"), sync, data) for sync in SYNCS]
    layout = configs[0].layout
    ranks = run_ranks(train_each, Grid(layout.axes), configs, token_axes=layout.token_axes)
    for results in zip(*ranks, strict=True):
        check(list(results), serial("gpt2"))


@pytest.mark.long
@pytest.mark.parametrize("data", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("model, tensor", [("untied", subgraph(2, "one")), ("bert", subgraph(4, "all"))], ids=str)
def test_every_sync_of_other_models(model: str, tensor: dict[str, Any], sync: str, data: int) -> None:
    check(run(with_sync(model, tensor, sync, data)), serial(model))


@pytest.mark.parametrize(
    "common, branch, recompute",
    [
        ("all", "attention-core", "selective"),
        ("one", "block", "auto"),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in product(COMMONS, BRANCHES, ("selective", "auto", 1))
            if case not in [("all", "attention-core", "selective"), ("one", "block", "auto")]
        ],
    ],
)
def test_recomputed(common: str, branch: str, recompute: str | int) -> None:
    tensor = subgraph(2, common, branch)
    check(run(config_for("gpt2", tensor, steps=SHORT, memory={"recompute": recompute})), serial("gpt2"))


def norm_of(mesh: Mesh, config: Config) -> float:
    """Return the norm of one step's gradient."""
    parts = build(config, mesh)
    backward(parts, global_batch(config, 0))
    parts.strategy.finish()
    return float(gradient_norm(parts.strategy.slots, mesh))


@pytest.mark.parametrize("common", COMMONS)
def test_the_norm_is_serial_s_and_is_clipped(common: str) -> None:
    config = with_sync("gpt2", subgraph(2, common, "block"), "zero1", 1)
    (expected,) = run_ranks(norm_of, Grid((("data", 1),)), config_for("gpt2", {"kind": "none"}))
    assert config.optimizer.clip is not None
    assert expected > config.optimizer.clip
    norms = run_ranks(norm_of, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert norms == pytest.approx([expected] * 2, rel=1e-12)
