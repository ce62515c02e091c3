"""A plan of gated delta nets has one recording for each kind of layer, with the products of `products`."""

from __future__ import annotations

import pytest
import torch

from meshwright.compute.model import Chunk
from meshwright.config import parse_config
from meshwright.families.qwen_next.model import QwenNextModel
from meshwright.planner.plan.recordings import Recordings
from meshwright.ranks.mailbox import TensorMeta
from meshwright.strategies.pipeline.task import TaskKind

T = 1024


def test_layers_of_two_kinds_are_recorded_once_each() -> None:
    config = parse_config({
        "model": {
            "family": "qwen3-next", "layers": 8, "hidden": 256, "heads": 4, "key_value_heads": 2, "head_width": 64,
            "rotary_width": 16, "linear_key_heads": 4, "linear_value_heads": 8, "linear_key_width": 32,
            "linear_value_width": 64, "feed_forward": 512, "positions": T, "vocabulary": 512,
        },
        "data": {"sequence": T}, "batch": {"global": 1},
    })  # fmt: skip
    recordings, costs = Recordings(), QwenNextModel.products(config)
    assert recordings.outline(config).alike == (0, 0, 0, 3, 0, 0, 0, 3)
    forms = (TensorMeta((1, T, config.model.hidden), torch.float32),)
    recorded = [recordings.of(config, Chunk(range(layer, layer + 1), False, False), forms) for layer in range(8)]
    flops = [one.programs[TaskKind.FORWARD][0].flops for one in recorded]
    assert len(recordings.recorded) == 2
    assert len(set(flops)) == len(set(costs.layers)) == 2
    # The recorder has triangular systems as element-wise kernels.
    system = 2 * T * 8 * 64 * (32 + 64) // 2
    assert flops[0] == pytest.approx(2 * costs.layers[0] - system, rel=1e-3)
    assert flops[3] == pytest.approx(2 * costs.layers[3], rel=1e-3)


def test_tokens_of_a_delta_net_cost_the_same_in_longer_sequences() -> None:
    """A sequence of twice the tokens has twice the products of a delta net, and more of attention."""
    layers = []
    for length in (1024, 2048):
        tree = {"model": "qwen3-next-80b-a3b", "data": {"sequence": length}, "batch": {"global": 1}}
        layers.append(QwenNextModel.products(parse_config(tree)).layers)
    short, long = layers
    assert long[0] == 2 * short[0]
    assert long[3] > 2.1 * short[3]
