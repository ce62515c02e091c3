"""Muon: matrices become orthogonal, layouts equal plain torch in float64, and layouts that cut matrices are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compute.parameters.bucket import BucketKey
from meshwright.compute.parameters.owners import dealt
from meshwright.compute.parameters.role import StepRule
from meshwright.config import Config, parse_run
from meshwright.config.section import with_field
from meshwright.ranks.errors import ConfigError
from meshwright.strategies.optim.muon import Muon, orthogonal
from tests.planner.plan.checked import check as check_counts
from tests.tools.verify.cases import config_for, verdict_of
from tests.training.checkpoint.states import Leg, run_leg
from tests.workers import run_ranks


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonal(matrix)
    values = (u.T @ result @ vt.T).diagonal()
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    torch.testing.assert_close(result, u @ values.diag() @ vt, rtol=0, atol=1e-10)


def test_the_reference_is_torchs_own_muon_but_for_its_half_precision() -> None:
    torch.manual_seed(3)
    start, gradients = torch.randn(6, 10), [torch.randn(6, 10) for _ in range(3)]
    results = []
    for make in (
        lambda weight: Muon(
            [
                {"params": [weight], "weight_decay": 0.1, "hidden": True},
                {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.0, "hidden": False},
            ],
            0.02,
            0.95,
            betas=(0.9, 0.95),
            eps=1e-8,
        ),
        lambda weight: torch.optim.Muon([weight], 0.02, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
    ):
        weight = torch.nn.Parameter(start.clone())
        optimizer = make(weight)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-3)


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"data": {"size": 2}},
    "stages": {"data": {"size": 2, "sync": "ring"}, "pipeline": {"size": 2}},
    "contexts": {"context": {"size": 2, "kind": "ring"}, "data": {"bucket": 1024}},
    "zero1": {"data": {"size": 2, "sync": "zero1"}},
    "zero1, small buckets": {"data": {"size": 4, "sync": "zero1", "bucket": 4096}},
    "zero1 in groups": {"data": {"size": 4, "sync": "zero1", "shard": 2, "bucket": 4096}},
    "zero1, stages": {"data": {"size": 2, "sync": "zero1"}, "pipeline": {"size": 2}},
    "zero1, contexts": {"data": {"size": 2, "sync": "zero1"}, "context": {"size": 2, "kind": "ulysses"}},
    "zero2": {"data": {"size": 3, "sync": "zero2", "bucket": 4096}},
    "zero2 in groups": {"data": {"size": 4, "sync": "zero2", "shard": 2}},
    "zero2, stages": {"data": {"size": 2, "sync": "zero2"}, "pipeline": {"size": 2}},
    "zero2, stages of chunks": {
        "data": {"size": 2, "sync": "zero2"},
        "pipeline": {"size": 2, "chunks": 2, "placement": "v", "partition": [0, 1, 1, 0]},
    },
    "server": {"data": {"size": 2, "sync": "server-gradient"}},
}
SETTINGS = {"name": "muon", "lr": 0.02, "momentum": 0.95, "clip": 0.5, "schedule": {"warmup": 1}}


def batch_for(layout: dict[str, Any]) -> dict[str, int]:
    return {"global": 12, "micro": 1 if layout["data"].get("size", 1) > 2 else 2}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_equal_plain_torch(layout: dict[str, Any], tmp_path: Path) -> None:
    layout = {"data": {"size": 1}} | layout
    config = config_for("gpt2", optimizer=SETTINGS, layout=layout, batch=batch_for(layout))
    verdict = verdict_of(config, tmp_path, 3)
    verdict.check()
    states = {row.name for row in verdict.rows if row.kind == "state"}
    assert "exp_avg of blocks.0.attention.output.weight" in states
    assert "exp_avg_sq of blocks.0.attention.output.weight" not in states


def test_frozen_matrices_have_no_momentum(tmp_path: Path) -> None:
    layout = {"data": {"size": 2, "sync": "zero1"}}
    config = with_field(config_for("gpt2", optimizer=SETTINGS, layout=layout), "model.frozen", ("blocks.0.*",))
    verdict = verdict_of(config, tmp_path, 3)
    verdict.check()
    assert not [row for row in verdict.rows if row.kind == "state" and "blocks.0." in row.name]


def test_each_matrix_has_one_owner_and_ranks_own_about_as_much() -> None:
    sizes = {"a": 9, "b": 4, "c": 4, "d": 1, "bias": 3}
    rules = {name: StepRule("matrices" if name != "bias" else "elements") for name in sizes}
    kinds = {rule: BucketKey(torch.float32, rule, ("data",), ()) for rule in rules.values()}
    groups = [(kinds[rules["bias"]], ["bias"]), (kinds[rules["a"]], ["d", "c", "b", "a"])]
    (same, _), (kind, names) = dealt(groups, sizes, lambda axes: 2)
    assert same == kinds[rules["bias"]]
    assert kind.segments == (0, 9, 18)
    assert names == ["a", "c", "b", "d"]
    (_, (kind, _)) = dealt(groups, sizes, lambda axes: 8)
    assert kind.segments == (0, 9, 13, 17, 18, 18, 18, 18, 18)


def test_plans_count_its_states() -> None:
    for sync in ("allreduce", "zero1", "zero2"):
        layout = {"data": {"size": 2, "sync": sync, "bucket": 8192}}
        check_counts([config_for("gpt2", optimizer=SETTINGS, layout=layout, batch={"global": 48, "micro": 8})])


@pytest.mark.parametrize("sync", ["zero1", "zero2"])
def test_another_layout_goes_on(sync: str, tmp_path: Path) -> None:
    def run_of(**layout: Any) -> Config:
        layout = {"data": {"size": 1}} | layout
        return config_for("gpt2", optimizer=SETTINGS, layout=layout, batch=batch_for(layout))

    def legs(config: Config, source: Path | None, target: Path | None, span: range) -> list[Leg]:
        return run_ranks(run_leg, config.grid, config, source, target, span.start, span.stop)

    straight = legs(run_of(), None, None, range(4))
    legs(run_of(data={"size": 3, "sync": sync}), None, tmp_path, range(2))
    after = legs(run_of(pipeline={"size": 2}, data={"size": 2, "sync": sync}), tmp_path / "step-2", None, range(2, 4))
    torch.testing.assert_close(after[0][0], straight[0][0][2:], rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            ["layout.data={size: 2, sync: zero3}"],
            "layout.data.sync=zero3 cuts the matrices .*valid: allreduce, .*zero2, .*ring",
        ),
        (
            ["layout.tensor={kind: megatron, size: 2}"],
            "layout.tensor.kind=megatron cuts the matrices .*none; or",
        ),
        (["memory.offload.to=host", "precision=bf16"], "memory.offload.to=host cuts the matrices .*valid: none; or"),
    ],
)
def test_what_cuts_matrices_is_refused_with_what_works(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told + r".*optimizer.name=adamw, sgd, momentum$"):
        parse_run({}, ["optimizer.name=muon", *words])
