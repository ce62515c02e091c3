"""Dropout between pairs of linears: ranks with the same activations draw one mask, all other ranks draw other masks."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.ranks.grid import Grid
from tests.compute.subgraph.draws import draws
from tests.oracle.tensor import config_for
from tests.workers import run_ranks

WHOLE = {"kind": "megatron", "size": 2}


@pytest.mark.host  # a GPU's trainer reports a step one step later, and masks are from another generator
@pytest.mark.parametrize(
    "tensor, alike",
    [(WHOLE, True), (WHOLE | {"sequence_parallel": True}, False), ({"kind": "tesseract", "q": 2, "d": 1}, False)],
    ids=["whole sequences", "cut sequences", "blocks"],
)
def test_masks_are_one_where_activations_are(tensor: dict[str, Any], alike: bool) -> None:
    """Two replicas drop in two steps on the same samples."""
    tree = config_for("gpt2", tensor, 2, steps=3).model_dump(mode="json", by_alias=True)
    tree["model"]["dropout"] = 0.5
    config = parse_config(tree)
    grid = Grid(config.layout.axes)
    ranks = run_ranks(draws, grid, config, token_axes=config.layout.token_axes)
    masks = [drawn["outside"] for drawn, _ in ranks]
    assert all(len(set(own)) == len(own) > 0 for own in masks), "two layers, microbatches or steps share a mask"
    for one, other in combinations(range(grid.world_size), 2):
        same_replica = grid.coordinates(one)["data"] == grid.coordinates(other)["data"]
        if alike and same_replica:
            assert masks[one] == masks[other]
        else:
            assert not set(masks[one]) & set(masks[other])
