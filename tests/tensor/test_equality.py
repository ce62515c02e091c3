"""Every tensor kit computes what one device computes: float64 gradients to 1e-12 relative, losses to 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.grid import Grid
from tests.data_parallel.test_equality import assembled, train
from tests.workers import run_ranks

STEPS = 20

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "positions": 12, "vocabulary": 300, "tied": True},
    "untied": {"family": "gpt2", "positions": 12, "vocabulary": 300, "tied": False},
    "bert": {"family": "bert", "positions": 12, "vocabulary": 300},
    "megatron-bert": {"family": "bert", "positions": 12, "vocabulary": 300, "norm_order": "megatron"},
    "vit": {"family": "vit", "image": 6, "patch": 2, "channels": 1, "classes": 10},
}

ONE_D = [{"kind": "megatron", "size": size} for size in (2, 3, 4)]
SEQUENCE = [layout | {"sequence_parallel": True} for layout in ONE_D]

BLOCKS = [{"kind": "tesseract", "q": q, "d": d} for q, d in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2))]


def config_for(model: str, tensor: dict[str, Any], data: int = 1, **changes: Any) -> Config:
    shape = {"layers": 2, "hidden": 24, "heads": 12, "vocabulary_multiple": 12, "dropout": 0.0}
    tree = {
        "model": shape | MODELS[model],
        "data": {"source": "digits"} if model == "vit" else {"sequence": 12},
        "batch": {"global": 24, "micro": 12},
        "layout": {"data": {"size": data, "bucket": 8192}, "tensor": tensor},
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "schedule": {"warmup": 3, "decay": "cosine"}},
        "steps": STEPS,
    }
    return parse_config(tree | changes)


def run(config: Config) -> list[Any]:
    return run_ranks(train, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)


@pytest.fixture(scope="module", params=list(MODELS))
def serial(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, run(config_for(request.param, {"kind": "none"}))[0]


def check(results: list[Any], serial: Any) -> None:
    losses, expected_gradients = serial
    for mine, _ in results:
        torch.testing.assert_close(mine, losses, rtol=1e-10, atol=0)
    for name, held in expected_gradients.items():
        (expected,) = held.values()
        actual = assembled([gradients[name] for _, gradients in results if name in gradients], expected.shape)
        error = (actual - expected).norm() / expected.norm()
        assert error <= 1e-12, f"{name}: {error}"


def label(tensor: dict[str, Any]) -> str:
    return "-".join(str(value) for value in tensor.values())


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tensor", ONE_D + SEQUENCE + BLOCKS, ids=label)
def test_equals_serial(tensor: dict[str, Any], data: int, serial: tuple[str, Any]) -> None:
    model, expected = serial
    check(run(config_for(model, tensor, data)), expected)
