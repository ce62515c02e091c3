"""Muon: matrices become orthogonal, layouts equal plain torch in float64, and what cuts matrices is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import parse_run
from meshwright.errors import ConfigError
from meshwright.optim.muon import Muon, orthogonal
from tests.tools.verify.cases import config_for, verdict_of


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
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_equal_plain_torch(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = {"name": "muon", "lr": 0.02, "momentum": 0.95, "clip": 0.5, "schedule": {"warmup": 1}}
    verdict_of(config_for("gpt2", optimizer=settings, layout=layout), tmp_path, 3).check()


@pytest.mark.parametrize(
    "words, told",
    [
        (["layout.data={size: 2, sync: zero1}"], "layout.data.sync=zero1 cuts the matrices .*valid: allreduce, .*ring"),
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
