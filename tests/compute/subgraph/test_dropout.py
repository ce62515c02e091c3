"""Dropout under sub-graphs: ranks that hold different rows or different heads draw different masks, in every step."""

from __future__ import annotations

import pytest

from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from tests.compute.subgraph.draws import draws
from tests.oracle.tensor import config_for
from tests.workers import run_ranks


def config_of(common: str, data: int) -> Config:
    tensor = {"kind": "subgraph", "size": 2, "common": common, "branch": "attention"}
    tree = config_for("gpt2", tensor, data, steps=3).model_dump(mode="json", by_alias=True)
    tree["model"]["dropout"] = 0.5
    tree["batch"]["micro"] = 12
    return parse_config(tree)


@pytest.mark.host  # a GPU's trainer reports a step one step later, and masks are from another generator
@pytest.mark.parametrize("common, data", [("all", 2), ("one", 1)])
def test_masks_differ_where_rows_or_heads_do(common: str, data: int) -> None:
    config = config_of(common, data)
    ranks = run_ranks(draws, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    assert len({tuple(losses) for _, losses in ranks}) == 1
    for where in ("outside", "inside"):
        draw = [drawn[where] for drawn, _ in ranks if drawn[where]]
        assert len(draw) == (1 if common == "one" and where == "outside" else 2 * data)
        every_mask = [mask for masks in draw for mask in masks]
        assert len(set(every_mask)) == len(every_mask), f"a mask came twice {where} of branches"
