"""The sends of each form of D&SP in a step, by the formulas of docs/subgraph.md; counted without sending anything."""

from __future__ import annotations

import math
from functools import cache

import pytest

from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.harness import counted_step
from tests.workers import run_ranks

LAYERS, HIDDEN, SEQUENCE, BATCH = 3, 16, 6, 8
ACTIVATION = 4 * BATCH * SEQUENCE * HIDDEN
"""Bytes of [B, T, H]."""

PAIRS = {"attention-core": 1, "attention": 1, "block": 2}
"""Pairs of a block that are cut."""


def config(size: int, common: str, branch: str, data: int = 1) -> Config:
    return parse_config(
        {
            "model": {
                "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "positions": SEQUENCE, "vocabulary": 300, "tied": False,
                "dropout": 0.0,
            },
            "data": {"sequence": SEQUENCE},
            "batch": {"global": BATCH * data},
            "layout": {
                "data": {"size": data},
                "tensor": {"kind": "subgraph", "size": size, "common": common, "branch": branch},
            },
        }
    )  # fmt: skip


def of_rank(_mesh: Mesh, config: Config, rank: int) -> tuple[dict[str, int], int, int, int, int]:
    """Return the bytes sent by axis, this rank's elements of branches and of common layers, and both of the whole
    model."""
    parts = counted_step(config, rank)
    cut = {name: "branch" in spec.placements for name, spec in parts.specs.items()}
    held, whole = [0, 0], [0, 0]
    for name, parameter in parts.model.named_parameters():
        held[cut[name]] += parameter.numel()
        whole[cut[name]] += math.prod(parts.specs[name].shape)
    return parts.mesh.ledger.sent_bytes(), held[1], held[0], whole[1], whole[0]


@cache
def counted(size: int, common: str, branch: str, rank: int, data: int = 1) -> tuple[dict[str, int], int, int, int, int]:
    """Count in another process: this process forks others, and must not have run a backward pass."""
    (result,) = run_ranks(of_rank, Grid((("data", 1),)), config(size, common, branch, data), rank)
    return result


def crossings(size: int, branch: str) -> int:
    """Return the bytes of a rank's splits and joins, with equal bytes each way."""
    if branch == "attention-core":  # query, key and value sliced, the heads' output joined: 4 all-to-alls' payload
        return 2 * LAYERS * 4 * ACTIVATION * (size - 1) // size**2
    return 2 * LAYERS * PAIRS[branch] * 2 * ACTIVATION * (size - 1) // size


@pytest.mark.parametrize("branch", PAIRS)
@pytest.mark.parametrize("size", [2, 4])
def test_common_layers_on_all(size: int, branch: str) -> None:
    assert counted(size, "all", branch, 0)[0]["branch"] == crossings(size, branch)


@pytest.mark.parametrize("branch", PAIRS)
@pytest.mark.parametrize("size", [2, 4])
def test_common_layers_on_one(size: int, branch: str) -> None:
    """The first rank sends every split, the others every join."""
    first, last = (counted(size, "one", branch, rank)[0].get("branch", 0) for rank in (0, size - 1))
    if branch == "attention-core":  # forward query, key, value out and the output in; backward three in and one out
        assert first == LAYERS * 4 * ACTIVATION * (size - 1) // size
        assert last == LAYERS * 4 * ACTIVATION // size
    else:  # forward out and in, backward the same
        assert first == LAYERS * PAIRS[branch] * 2 * ACTIVATION * (size - 1)
        assert last == LAYERS * PAIRS[branch] * 2 * ACTIVATION


@pytest.mark.parametrize("branch", PAIRS)
def test_a_branch_is_not_reduced_over_sub_grids(branch: str) -> None:
    """Common gradients are summed over data and branch; branches' gradients over data alone, and only a sub-grid's
    share."""
    size, data = 2, 2
    traffic, _, _, branches, common = counted(size, "all", branch, 0, data)
    ranks = size * data
    assert traffic["data+branch"] == pytest.approx(2 * (ranks - 1) / ranks * 4 * common, rel=1e-3)
    assert traffic.get("data", 0) == pytest.approx(2 * (data - 1) / data * 4 * branches / size, rel=1e-3)
    assert bool(branches) == (branch != "attention-core")


@pytest.mark.parametrize("common", ["all", "one"])
@pytest.mark.parametrize("branch", PAIRS)
def test_a_rank_holds_its_share_of_the_branches(branch: str, common: str) -> None:
    size = 4
    for rank in (0, size - 1):
        _, branches, rest, all_branches, all_common = counted(size, common, branch, rank)
        assert branches * size == all_branches
        assert rest == (all_common if common == "all" or rank == 0 else 0)
