"""Tiny runs of every family, with batches, for `verify`: a rank and the reference both read the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.compute.model import Batch, rows_of
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify.job import Verdict, compare_runs, leave_layout, leave_reference, one_device
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.workers import run_ranks

TEXT = {"positions": 12, "vocabulary": 300}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "layers": 2, **TEXT},
    "untied": {"family": "gpt2", "layers": 1, "tied": False, **TEXT},
    "llama": {
        "family": "llama", "layers": 1, "key_value_heads": 2, "feed_forward": 40, "head_norms": True,
        "biases": ["query-key-value"], **TEXT,
    },
    "experts": {
        "family": "llama", "layers": 1, "feed_forward": 16, **TEXT,
        "experts": {"count": 4, "per_token": 2, "balance": 0.3},
    },
    "deepseek": {
        "family": "deepseek", "layers": 2, "query_rank": 8, "key_value_rank": 12, "head_width": 6, "rotary_width": 4,
        "value_width": 8, "feed_forward": 40, "later_tokens": 1, **TEXT,
        "experts": {
            "count": 6, "per_token": 2, "width": 12, "dense_layers": 1, "shared": 16, "scores": "sigmoid", "scale": 1.5,
            "groups": 3, "groups_per_token": 2, "bias_rate": 0.05, "balance": 0.3, "balance_over": "microbatch",
            "router_z": 0.01,
        },
    },
    "qwen3-next": {  # norms of heads of 5 numbers divide by values near zero, hence the larger epsilon
        "family": "qwen3-next", "layers": 2, "key_value_heads": 2, "head_width": 6, "rotary_width": 4,
        "feed_forward": 40, "attention_layers": [False, True], "linear_key_heads": 2, "linear_value_heads": 4,
        "linear_key_width": 6, "linear_value_width": 5,
        "norm_epsilon": 1e-3, **TEXT,
    },
    "bert": {"family": "bert", "layers": 1, **TEXT},
    "megatron-bert": {"family": "bert", "layers": 1, "norm_order": "megatron", **TEXT},
    "vit": {"family": "vit", "layers": 1, "image": 6, "patch": 2, "channels": 1, "classes": 10},
    "transformer": {"family": "transformer", "layers": 1, "feed_forward": 48, "label_smoothing": 0.1, **TEXT},
    "t5": {
        "family": "t5", "layers": 1, "feed_forward": 48, "head_width": 3, "distance_buckets": 8, "distance_max": 10,
        "label_smoothing": 0.1, **TEXT, "vocabulary": 360,
    },
    "resnext": {
        "family": "resnext", "hidden": 12, "stage_blocks": [1, 1], "paths": 4, "path_width": 2, "stem": "small",
        "image": 6, "channels": 1, "classes": 10,
    },
}  # fmt: skip
IMAGES = ("vit", "resnext")


def config_for(name: str = "gpt2", **changes: Any) -> Config:
    """Return a run in which every optimizer setting matters: clipping is active, rates rise and fall, weights decay."""
    shape: dict[str, Any] = {"hidden": 24, "vocabulary_multiple": 8, "dropout": 0.0}
    if name != "resnext":
        shape["heads"] = 4
    tree = {
        "model": shape | MODELS[name],
        "data": {"source": "digits"} if name in IMAGES else {"sequence": 12},
        "batch": {"global": 12, "micro": 3},
        "precision": {"level": "O0", "dtype": "float64"},
        "optimizer": {
            "lr": 1e-2, "clip": 0.1, "weight_decay": 0.1,
            "schedule": {"warmup": 2, "decay": "cosine"},
        },
        "steps": 6,
    }  # fmt: skip
    return parse_config(tree | changes)


class Drawn:
    """Random global batches with different numbers of labels in samples."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __len__(self) -> int:
        return 2**30

    def samples(self, first: int, count: int) -> Batch:
        step, offset = divmod(first, self.config.batch.global_)
        return rows_of(BATCHES[self.config.model.family](self.config, step), slice(offset, offset + count))

    def held_out(self, first: int, count: int) -> Batch:
        return self.samples(first, count)


class Repeated(Drawn):
    """The first sample, repeated: microbatches with equal gradients."""

    def samples(self, first: int, count: int) -> Batch:
        return {name: x.expand(count, *x.shape[1:]) for name, x in super().samples(0, 1).items()}


def batches(config: Config) -> Iterator[Batch]:
    step = 0
    while True:
        yield BATCHES[config.model.family](config, step)
        step += 1


Plant = Callable[[], None]
"""A function that breaks something in a rank's process, before the rank's parts are built."""


def layout_rank(mesh: Mesh, train: Drawn, folder: Path, steps: int, plant: Plant | None) -> None:
    if plant is not None:
        plant()
    leave_layout(build(train.config, mesh, folder), train, folder, steps)


def reference_rank(mesh: Mesh, train: Drawn, folder: Path, steps: int, plant: Plant | None) -> None:
    if plant is not None:
        plant()
    leave_reference(one_device(train.config, steps), train, folder, steps, torch.device("cpu"))


def run_layout(train: Drawn, folder: Path, steps: int, plant: Plant | None = None) -> Path:
    """Run the layout in forked ranks; return `folder` with the ranks' results."""
    folder.mkdir()
    config = train.config
    run_ranks(layout_rank, config.grid, train, folder, steps, plant, token_axes=config.layout.token_axes)
    return folder


def run_reference(train: Drawn, folder: Path, steps: int, plant: Plant | None = None) -> Path:
    folder.mkdir()
    run_ranks(reference_rank, Grid((("data", 1),)), train, folder, steps, plant)
    return folder


def verdict_of(config: Config, folder: Path, steps: int) -> Verdict:
    """Return the verdict of `meshwright verify`, from forked ranks."""
    train = Drawn(config)
    layout = run_layout(train, folder / "layout", steps)
    return compare_runs(config, layout, run_reference(train, folder / "reference", steps), steps)
