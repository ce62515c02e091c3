"""Pairs of answers under `bits: layout-free`: a grain has whole pairs; layouts that cut no layer have equal bits."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.compute.model import IGNORED, Batch
from meshwright.config import Config
from meshwright.data.preferences import PreferencePairs
from meshwright.ranks.mesh import Mesh
from meshwright.training.references import log_probabilities
from tests.compute.bits.runs import Ended, ended
from tests.compute.models.preferring import preferring, random_pairs
from tests.harness import build
from tests.workers import run_ranks

FLOAT32 = {"level": "O0", "dtype": "float32"}
BF16 = {"level": "O2", "dtype": "bf16"}
SHAPE = {"hidden": 64, "heads": 4, "dropout": 0.1}
MIXED = {
    "layout": {"data": {"size": 2, "sync": "zero3"}, "pipeline": {"size": 2, "schedule": "1f1b"}},
    "batch": {"global": 8, "micro": 1}, "memory": {"recompute": 1},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "microbatches": {"batch": {"global": 8, "micro": 1}},
    "replicas": {"layout": {"data": {"size": 4}}, "batch": {"global": 8, "micro": 2}},
    "zero1": {"layout": {"data": {"size": 2, "sync": "zero1"}}, "batch": {"global": 8, "micro": 4}},
    "stages": {"layout": {"pipeline": {"size": 2}}, "batch": {"global": 8, "micro": 2}},
    "recomputation": {"memory": {"recompute": "selective"}},
}


def config_of(precision: dict[str, str], **changes: Any) -> Config:
    layout = changes.pop("layout", {})
    return preferring(layout, model=SHAPE, precision=precision, bits="layout-free", **changes)


@cache
def on_one_device(dtype: str) -> Ended:
    return ended(config_of(FLOAT32 if dtype == "float32" else BF16))


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "mixed" else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_end_with_the_bits_of_one_device(layout: str, dtype: str) -> None:
    config = config_of(FLOAT32 if dtype == "float32" else BF16, **LAYOUTS[layout])
    assert ended(config).differing(on_one_device(dtype)) == []


def test_equal_bits_are_the_usual_numbers() -> None:
    undropped = {"model": SHAPE | {"dropout": 0.0}, "precision": {"level": "O0", "dtype": "float64"}}
    exact, usual = (ended(preferring({}, **undropped, bits=bits)).numbers for bits in ("layout-free", "usual"))
    both = [[float.fromhex(number) for line in numbers for number in line.split()] for numbers in (exact, usual)]
    assert both[0] == pytest.approx(both[1], rel=1e-11)


class Pairs:
    """Random pairs by number; the number -1 is no pair."""

    def __init__(self, config: Config) -> None:
        self.batch = random_pairs(config, 0)

    def __len__(self) -> int:
        return len(self.batch["pairs"])

    def numbered(self, numbers: np.ndarray) -> Batch:
        rows = {name: x[torch.from_numpy(numbers)] for name, x in self.batch.items()}
        return rows | {"pairs": torch.from_numpy(np.where(numbers < 0, IGNORED, numbers))[:, None]}


def reference(mesh: Mesh, config: Config) -> Tensor:
    pairs = Pairs(config)
    parts = build(config, mesh)
    return log_probabilities(parts, cast(PreferencePairs, pairs), np.arange(len(pairs) - 1))


def test_the_reference_has_equal_bits_under_layouts() -> None:
    tables = []
    for changes in ({}, MIXED, LAYOUTS["microbatches"]):
        config = config_of(FLOAT32, **changes)
        tables += run_ranks(reference, config.grid, config, token_axes=config.layout.token_axes)
    assert all(torch.equal(table, tables[0]) for table in tables)
    assert tables[0][:-1].lt(0).all()
    assert tables[0][-1].eq(0).all()
