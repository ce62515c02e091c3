"""Checkpoints written under one layout and read under another."""

from __future__ import annotations

import torch

from meshwright.compute.parameters.shard import Box
from meshwright.training.checkpoint import Checkpoint
from tests.training.checkpoint.states import Leg, States, whole

KINDS = {"weight", "exp_avg", "exp_avg_sq"}


def taken_up(ranks: list[Leg]) -> States:
    return whole([held for _, held, _ in ranks])


def written(ranks: list[Leg]) -> States:
    return whole([held for _, _, held in ranks])


def assert_same_bits(actual: States, expected: States) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key


def read_whole(checkpoint: Checkpoint, kinds: set[str]) -> States:
    shapes = checkpoint.shapes
    return {
        (kind, name): checkpoint.read(name, kind, Box(tuple(0 for _ in shape), shape))
        for name, shape in shapes.items()
        for kind in kinds
    }
