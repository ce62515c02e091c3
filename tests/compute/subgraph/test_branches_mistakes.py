"""Branches that an axis cannot have are refused, with valid values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.compute.subgraph.branches import Branches
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh, solo_mesh
from tests.workers import run_ranks


def mistakes(mesh: Mesh) -> list[str]:
    """Return the message of each mistake."""
    settings: dict[str, Any] = {"enter": "slice", "leave": "sum", "mesh": mesh, "num_rows": 8}
    made: list[tuple[int, dict[str, Any], tuple[int, int]]] = [
        (4, {"num_rows": 6}, (2, 12)),
        (4, {"common": 5}, (2, 12)),
        (3, {}, (2, 12)),
        (4, {"costs": (1, 2)}, (2, 12)),
        (4, {"widths": (0, 3, 3, 3)}, (2, 12)),
        (4, {"widths": (3, 3, 3, 4)}, (2, 12)),
        (4, {}, (2, 13)),
        (4, {}, (3, 12)),
        (4, {"enter": "copy"}, (2, 12)),
        (4, {"out_widths": (3, 3, 3, 3)}, (2, 12)),
        (4, {"dim": 0}, (2, 12)),
        (5, {"leave": "concat", "out_widths": (1, 1, 1, 1, 1), "enter": "split"}, (2, 3)),
    ]
    told = []
    for count, change, shape in made:
        with pytest.raises(ConfigError) as caught:
            Branches([nn.Linear(3, 3) for _ in range(count)], **(settings | change))(torch.ones(shape))
        told.append(str(caught.value))
    return told


def test_mistakes_are_named() -> None:
    multiples = "valid: multiples of 4: 4, 8, 12, ..."
    for rank, told in enumerate(run_ranks(mistakes, Grid((("data", 1), ("branch", 4))))):
        assert told[:-1] == [
            f"num_rows=6 rows do not fall into equal parts for the 4 ranks of axis branch; {multiples}",
            "common=5 is no number of ranks of an axis of 4; valid: all, one, or 1 to 4",
            "branches=3 branches are fewer than the 4 sub-grids they are assigned to; valid: 4 or more",
            "costs=[1, 2] are 2 values for 4 branches; valid: 4 values",
            "widths=[0, 3, 3, 3] has a part without a width; valid: whole numbers from 1 up",
            "widths=13 is not the width 12 of dim -1, which falls to 4 branches; valid: 4 widths, together 12",
            "widths=12 is not the width 13 of dim -1, which falls to 4 branches; valid: 4 widths, together 13",
            f"x=3 rows are not the 2 that rank {rank} holds of num_rows=8; valid: 2",
            "enter=copy is no step between common layers and branches; valid: split or slice",
            "out_widths=[3, 3, 3, 3] have no effect with leave=sum; valid: leave=concat",
            "dim=0 is the dim of the rows; valid: any other",
        ]
        hand = [[0, 1], [2], [3], [4]][rank]
        assert told[-1].startswith(
            f"out_widths=(1, 1, 1, 1, 1) are not the widths of the outputs of branches {hand}: [3"
        )


def test_a_parameter_without_a_dim_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("alpha", nn.Parameter(torch.tensor(1.0)))
    mesh = solo_mesh(torch.device("cpu"), ("data", "branch"))
    with pytest.raises(ConfigError, match=r"branches=0.alpha is a parameter without a dim"):
        Branches([module], enter="split", leave="sum", mesh=mesh, num_rows=1)
