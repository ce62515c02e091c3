"""The compared forms are runs that `meshwright train` would take, of one model and one amount of work."""

from __future__ import annotations

import pytest

from benchmarks import subgraph
from benchmarks.ours import reference_config
from meshwright.compute.models.chain import chain_of
from meshwright.config.rules import broken_rules
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks


@pytest.mark.parametrize("form", subgraph.FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_forms_are_runs(form: str, ranks: int) -> None:
    alone = reference_config(subgraph.options_of("data parallel", 1, 8, 8))
    config = reference_config(subgraph.options_of(form, ranks, 8, 8))
    assert not broken_rules(config)
    assert config.layout.world_size == ranks
    assert chain_of(config).products(config) == chain_of(alone).products(alone)
    assert chain_of(config).sample_shapes(config)["target"] == (subgraph.SEQUENCE,)


def megabytes(_mesh: Mesh, form: str) -> tuple[float, float]:
    return subgraph.sent_megabytes(form, 2, 8)


def test_sub_grids_do_not_sum_their_branches() -> None:
    one_rank = Grid((("data", 1),))
    ((whole, nothing),) = run_ranks(megabytes, one_rank, "data parallel")
    ((common, crossing),) = run_ranks(megabytes, one_rank, "D&SP, attention")
    width, hidden = 8 * subgraph.HEAD_WIDTH, 256
    branches = 6 * 4 * width * hidden + 2 * 32 * 8  # six attentions of four linears, two tables of biases
    assert nothing == 0
    assert crossing > 0
    assert whole - common == pytest.approx(
        2 * 4 * branches / 1e6, rel=1e-3
    )  # both ranks send half of the branches, there and back
