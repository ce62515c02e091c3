"""Recomputation: the same bits of every gradient with dropout on, and fewer kept bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import Config, parse_config
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.strategies.memory.section import best_group, groups_of
from meshwright.training.parts import Parts
from meshwright.training.rank_model import empty_batch
from tests.harness import build
from tests.oracle.pipeline import WHOLE, pipelined
from tests.oracle.run import train_step
from tests.oracle.tensor import BLOCKS, ONE_D, SEQUENCE
from tests.workers import run_ranks

SETTINGS = ("auto", 1, 3, "selective", "ops", "offload")
LAYERS = 4

Left = tuple[list[float], list[list[Tensor]]]
"""Losses and slots' gradients of each step."""


def config_of(model: str, stages: int, tensor: dict[str, Any], **changes: Any) -> Config:
    """Return a config with dropout 0.1, one step and four microbatches."""
    tree = pipelined(model, stages, "message-driven", tensor).model_dump(mode="json", by_alias=True)
    tree["model"] |= {"dropout": changes.pop("dropout", 0.1), "layers": LAYERS}
    tree["optimizer"]["schedule"]["warmup"] = 1
    return parse_config(tree | {"steps": 1} | changes)


def with_setting(config: Config, setting: str | int) -> Config:
    tree = config.model_dump(mode="json", by_alias=True)
    tree["memory"]["recompute"] = setting
    return parse_config(tree)


def left_by(mesh: Mesh, configs: list[Config]) -> list[Left]:
    """Return the results of each config in turn. Only the first may have stages: epochs of a mailbox grow."""
    results = []
    for config in configs:
        parts = build(config, mesh)
        steps = [train_step(parts, step) for step in range(config.steps)]
        gradients = [[part for held in step.values() for part in held.values()] for _, step in steps]
        results.append(([loss for loss, _ in steps], gradients))
    return results


def assert_same_bits(mine: Left, wanted: Left) -> None:
    assert mine[0] == wanted[0]
    for step, wanted_step in zip(mine[1], wanted[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, wanted_step, strict=True))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (1, WHOLE),
    "1-D": (1, ONE_D[0]),
    "1-D cut": (1, SEQUENCE[0]),
    "2-D": (1, BLOCKS[1]),
    "sub-graphs": (1, {"kind": "subgraph", "size": 2, "branch": "attention-core"}),
    "sub-graphs, common one": (1, {"kind": "subgraph", "size": 2, "common": "one", "branch": "block"}),
    "2 stages": (2, WHOLE),
    "2 stages, 1-D": (2, ONE_D[0]),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes(layout: str) -> None:
    compare("gpt2", layout)


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["bert", "megatron-bert", "vit"])
def test_no_bit_changes_in_any_model(model: str) -> None:
    compare(model, "serial")


def compare(model: str, layout: str) -> None:
    stages, tensor = LAYOUTS[layout]
    # 2-D products are added up in place: no product is left to keep.
    settings = (
        SETTINGS if tensor is WHOLE else ("auto", "selective", "offload", *(["ops"] if tensor is not BLOCKS[1] else []))
    )
    configs = [with_setting(config_of(model, stages, tensor), setting) for setting in ("none", *settings)]
    grid, axes = Grid(configs[0].layout.axes), configs[0].layout.token_axes
    groups = [[config] for config in configs] if stages > 1 else [configs]
    runs = [run_ranks(left_by, grid, group, token_axes=axes) for group in groups]
    for rank in range(grid.world_size):
        wanted, *others = (left for run in runs for left in run[rank])
        for other in others:
            assert_same_bits(other, wanted)


@pytest.mark.host  # on a GPU, cuDNN adds up dQ in no fixed order
@pytest.mark.parametrize("level, dtype", [("O1", "bf16"), ("O2", "bf16")])
def test_no_bit_changes_in_half_precision(level: str, dtype: str) -> None:
    config = config_of("gpt2", 1, WHOLE, precision={"level": level, "dtype": dtype})
    configs = [with_setting(config, setting) for setting in ("none", "auto", "selective", "ops", "offload")]
    ((wanted, *others),) = run_ranks(left_by, Grid(config.layout.axes), configs)
    for other in others:
        assert_same_bits(other, wanted)


def first_loss(mesh: Mesh, config: Config) -> float:
    parts = build(config, mesh)
    return train_step(parts, 0)[0]


def test_dropout_is_on() -> None:
    with_dropout = run_ranks(first_loss, Grid((("data", 1),)), config_of("gpt2", 1, WHOLE))
    without = run_ranks(first_loss, Grid((("data", 1),)), config_of("gpt2", 1, WHOLE, dropout=0.0))
    assert with_dropout != without


@cache
def counted(model: str, setting: str | int, dropout: float) -> int:
    """Return the bytes that a microbatch's forward pass keeps."""
    config = with_setting(config_of(model, 1, WHOLE, dropout=dropout), setting)
    parts = plan(config)
    batch = empty_batch(config, parts.kit, parts.model, torch.device("meta"))
    scales = dict.fromkeys(parts.model.labels, 1.0)
    with LiveBytes() as live:
        loss = parts.model(batch, scales)
        return live.live - size_bytes(*loss)


def plan(config: Config) -> Parts:
    return build(config, planned_mesh(Grid(config.layout.axes), 0, config.layout.token_axes))


@pytest.mark.parametrize("model", ["gpt2", "bert", "vit"])
def test_groups_keep_less(model: str) -> None:
    assert counted(model, "auto", 0.1) < counted(model, "none", 0.1) / 2
    assert counted(model, 1, 0.1) < counted(model, "none", 0.1) / 2


@pytest.mark.parametrize("model, dropout", [("gpt2", 0.1), ("bert", 0.1), ("bert", 0.0), ("vit", 0.1)])
def test_selective_keeps_less(model: str, dropout: float) -> None:
    """With dropout on the attention weights, or a mask, the core keeps the weights [B, A, T, T]."""
    assert counted(model, "selective", dropout) < counted(model, "none", dropout)
    assert counted(model, "selective", dropout) > counted(model, "auto", dropout)


@pytest.mark.parametrize(
    "stage_layers, network_layers, group",
    [
        (12, 12, 3),  # sqrt 3.46: 3 is nearer than 4
        (6, 12, 3),
        (4, 12, 4),
        (24, 24, 4),  # sqrt 4.9: 4 is nearer than 6
        (8, 48, 8),
        (12, 48, 6),
        (7, 7, 1),  # a prime: sqrt 2.65 is nearer to 1 than to 7
        (7, 49, 7),
        (5, 36, 5),
        (5, 8, 1),
        (1, 100, 1),
        (6, 16, 3),
        (2, 1, 1),
        (0, 12, 1),  # a stage without layers
    ],
)
def test_best_group(stage_layers: int, network_layers: int, group: int) -> None:
    assert best_group(stage_layers, network_layers) == group


def test_of_two_as_near_the_smaller() -> None:
    assert best_group(6, 4) == 2
    assert best_group(15, 16) == 3  # 3 and 5 are both 1 from 4


@pytest.mark.parametrize(
    "layers, every, groups",
    [
        (range(4), 2, (range(2), range(2, 4))),
        (range(3, 8), 2, (range(3, 5), range(5, 7), range(7, 8))),
        (range(2), 5, (range(2),)),
        (range(3), 1, (range(1), range(1, 2), range(2, 3))),
        (range(0), 1, ()),
    ],
)
def test_groups(layers: range, every: int, groups: tuple[range, ...]) -> None:
    assert groups_of(layers, every) == groups
