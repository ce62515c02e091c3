"""Collectives take the seconds of the textbooks' formulas; links are shared; more bytes or ranks never take less."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.network import ClusterNetwork
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import VERBS
from tests.planner.plan.clusters import FLAT, INNER, NODES, OUTER, cluster

BIG = 10**8
A, B = 1e-6, 1e11  # INNER
FAR, THIN = 1e-5, 1e10  # OUTER


def seconds(of: Cluster, verb: str, *axes: tuple[str, int], over: str = "data", payload: int = BIG) -> float:
    return ClusterNetwork(of, "torch", Grid(axes)).collective(over, verb, payload)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_on_one_level(n: int) -> None:
    data = ("data", n)
    step = BIG / n / B + A
    assert seconds(FLAT, "all_reduce", data) == pytest.approx(2 * (n - 1) * step)
    for verb in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert seconds(FLAT, verb, data) == pytest.approx((n - 1) * step), verb
    for verb in ("broadcast", "reduce"):
        assert seconds(FLAT, verb, data) == pytest.approx(BIG / B + (n - 1) * A), verb
    assert seconds(FLAT, "send", data) == pytest.approx(BIG / B + A)


def test_blocks_share_the_links_of_their_node() -> None:
    """Row 4 x col 4 on nodes of four. If a node has a row of ranks, four groups over `row` leave the node, and none
    over `col`. If a node has a block of 2 x 2, two groups over either axis do."""
    square, blocks = (("row", 4), ("col", 4)), (("row", 2), ("col", 2), ("row", 2), ("col", 2))
    alone = cluster({**INNER, "joins": 4}, OUTER)

    def gather(over: str, nesting: tuple[tuple[str, int], ...]) -> float:
        return ClusterNetwork(alone, "torch", Grid(square, nesting=nesting)).collective(over, "all_gather", BIG)

    assert gather("col", square) == pytest.approx(3 / 4 * BIG / B + 3 * A)
    assert gather("row", square) == pytest.approx(3 / 4 * BIG / (THIN / 4) + 3 * FAR)
    between = 1 / 2 * BIG / (THIN / 2) + FAR
    assert gather("row", blocks) == gather("col", blocks) == pytest.approx(1 / 2 * BIG / B + A + between)


def test_messages_of_a_split_pipe() -> None:
    """Pipe 4 in two parts around data 2, on nodes of two: stages 0 and 1 share a node; stage 1 alone sends to another
    node."""
    pairs = cluster({**INNER, "joins": 2}, OUTER)
    grid = Grid((("pipe", 4), ("data", 2)), nesting=(("pipe", 2), ("data", 2), ("pipe", 2)))
    network = ClusterNetwork(pairs, "torch", grid)
    ranks = [grid.rank({"pipe": stage, "data": 0}) for stage in range(4)]
    assert ranks == [0, 1, 4, 5]
    assert network.message(ranks[0], ranks[1], BIG) == pytest.approx(BIG / B + A)
    assert network.message(ranks[1], ranks[2], BIG) == pytest.approx(BIG / THIN + FAR)


def test_small_payloads_take_trees() -> None:
    data = ("data", 16)
    assert seconds(FLAT, "all_reduce", data, payload=8) == pytest.approx(2 * 4 * A, rel=1e-3)
    assert seconds(FLAT, "broadcast", data, payload=8) == pytest.approx(4 * A, rel=1e-3)
    assert seconds(FLAT, "all_gather", data, payload=8) == pytest.approx(15 * A, rel=1e-3)


def test_on_two_levels() -> None:
    """Ranks of a node reduce-scatter and all-gather inside; all four do a part of the all-reduce between nodes."""
    inside, between = 3 / 4 * BIG / B + 3 * A, 1 / 2 * BIG / THIN + FAR
    assert seconds(NODES, "all_reduce", ("data", 8)) == pytest.approx(2 * (inside + between))
    assert seconds(NODES, "all_gather", ("data", 8)) == pytest.approx(inside + between)


def test_one_ring_over_all_levels_where_it_is_less() -> None:
    """On 64 nodes the thin links carry nearly all of the payload either way, and the ring hides the inner links."""
    levels = {**INNER, "joins": 4, "bandwidth": THIN}, OUTER
    ring = 255 / 256 * BIG / THIN + 192 * A + 64 * FAR - A
    assert seconds(cluster(*levels), "reduce_scatter", ("data", 256)) == pytest.approx(ring)


def test_pairs_meet_on_their_own_level() -> None:
    part = BIG / 8
    inside = 3 * (part / B + A)
    assert seconds(NODES, "gather", ("data", 8)) == pytest.approx(inside + 4 * (part / THIN + FAR))
    assert seconds(NODES, "all_to_all", ("data", 8)) == pytest.approx(inside + 4 * (4 * part / THIN + FAR))


def test_on_a_ring_parts_go_farther() -> None:
    ring = cluster({**INNER, "kind": "ring"})
    for n, passed in ((2, 1), (3, 2), (4, 4), (8, 16)):
        expected = passed * BIG / n / B + (n - 1) * A
        assert seconds(ring, "all_to_all", ("data", n)) == pytest.approx(expected)
    assert seconds(ring, "all_reduce", ("data", 8)) == seconds(FLAT, "all_reduce", ("data", 8))


def test_on_a_mesh_fewer_have_fewer_links() -> None:
    mesh = cluster({**INNER, "joins": 4, "kind": "mesh"}, OUTER)
    assert seconds(mesh, "all_reduce", ("data", 4)) == seconds(NODES, "all_reduce", ("data", 4))
    assert seconds(mesh, "send", ("data", 2)) == pytest.approx(3 * BIG / B + A)
    assert ClusterNetwork(mesh, "torch", Grid((("pipe", 4),))).message(0, 1, BIG) == pytest.approx(3 * BIG / B + A)


def test_groups_share_what_leaves_a_node() -> None:
    alone = seconds(NODES, "all_reduce", ("data", 2), ("tensor", 4), over="data+tensor")
    assert alone < seconds(NODES, "all_reduce", ("data", 2), ("tensor", 4))  # four groups of two, each one's own S
    for inner in (2, 4):
        shared = seconds(NODES, "send", ("data", 8 // inner), ("tensor", inner))
        assert shared == pytest.approx(inner * BIG / THIN + FAR)


def test_a_device_gets_its_own_card_only() -> None:
    carded = cluster({**INNER, "joins": 4}, {**OUTER, "device_bandwidth": THIN / 4})
    assert seconds(carded, "send", ("data", 2), ("tensor", 4)) == pytest.approx(4 * BIG / THIN + FAR)
    grid = Grid((("pipe", 8),))
    assert ClusterNetwork(carded, "torch", grid).message(3, 4, BIG) == pytest.approx(4 * BIG / THIN + FAR)
    assert ClusterNetwork(NODES, "torch", grid).message(3, 4, BIG) == pytest.approx(BIG / THIN + FAR)


def test_messages_share_what_leaves_a_node() -> None:
    """All four ranks of a node send to the next node at once; of a pipe inside of nodes, one rank sends."""
    outside = ClusterNetwork(NODES, "torch", Grid((("pipe", 2), ("data", 4))))
    assert outside.message(0, 4, BIG) == outside.message(5, 1, BIG) == pytest.approx(4 * BIG / THIN + FAR)
    inside = ClusterNetwork(NODES, "torch", Grid((("data", 2), ("pipe", 4))))
    assert inside.message(0, 1, BIG) == pytest.approx(BIG / B + A)
    across = ClusterNetwork(NODES, "torch", Grid((("pipe", 4), ("data", 2))))
    assert across.message(2, 4, BIG) == pytest.approx(2 * BIG / THIN + FAR)
    assert across.message(0, 2, BIG) == pytest.approx(BIG / B + A)


def test_axes_that_cut_nodes_unevenly_wait_for_the_slowest_group() -> None:
    """Nodes of three, groups of two: the second group is across nodes 0 and 1."""
    threes = cluster({**INNER, "joins": 3}, OUTER)
    even = seconds(threes, "send", ("data", 1), ("tensor", 2), over="tensor")
    assert even == pytest.approx(BIG / B + A)
    uneven = seconds(threes, "send", ("data", 3), ("tensor", 2), over="tensor")
    assert uneven == pytest.approx(BIG / THIN + FAR)


def test_ends_meet() -> None:
    """Only the first and the last of a node's four stages are in such a group."""
    assert seconds(NODES, "send", ("data", 4), ("pipe", 4), over="ends") == pytest.approx(BIG / B + A)
    assert seconds(NODES, "send", ("pipe", 4), ("data", 2), over="ends") == pytest.approx(2 * BIG / THIN + FAR)
    assert seconds(NODES, "all_reduce", ("pipe", 1), ("data", 2), over="ends") == 0


def test_branches_innermost_stay_inside_of_nodes() -> None:
    """SUPER's placement: segments inside of nodes beat segments across nodes."""
    for verb in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"):
        innermost = seconds(NODES, verb, ("data", 8), ("branch", 4), over="branch")
        assert innermost * 5 < seconds(NODES, verb, ("branch", 4), ("data", 8), over="branch"), verb


def test_cubes_send_less_than_squares() -> None:
    """Tesseract, section 3.1: p = 64 as [4, 4, 4] moves panels over q = 4 ranks, and over q = 8 as [8, 8]."""
    payload = 2**26

    def products(q: int, d: int) -> float:
        axes = ("depth", d), ("row", q), ("col", q)
        network = ClusterNetwork(FLAT, "torch", Grid(axes))
        panels = [network.collective("col", "broadcast", payload // (q * q * d))]
        panels += [network.collective("row", "broadcast", payload // (q * q))]
        return q * sum(panels)

    assert products(4, 4) < products(8, 1)
    assert products(2, 2) / products(2, 1) == pytest.approx(3 / 4, rel=0.1)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_seconds(verb: str) -> None:
    assert seconds(FLAT, verb, ("data", 4)) > 0


def test_no_other_verb_has_seconds() -> None:
    with pytest.raises(AssertionError, match="shout: nobody knows how it goes over links"):
        seconds(FLAT, "shout", ("data", 4))


def test_nobody_to_talk_to() -> None:
    for verb in VERBS:
        assert seconds(FLAT, verb, ("data", 1)) == 0


MEASURED = [
    {"verb": "all_reduce", "ranks": 2, "points": [[1000, 1e-4], [100000, 1e-3]]},
    {"verb": "all_reduce", "ranks": 8, "points": [[1000, 4e-4], [100000, 4e-3]]},
    {"verb": "message", "ranks": 2, "points": [[1000, 5e-5]]},
]


@pytest.mark.parametrize(
    "payload, two, four",
    [(0, 1e-4, 2e-4), (1000, 1e-4, 2e-4), (10000, 10**-3.5, 2 * 10**-3.5), (10**6, 0.01, 0.02)],
)
def test_measured_goes_before_models(payload: int, two: float, four: float) -> None:
    timed = cluster(INNER, measured=MEASURED)
    assert seconds(timed, "all_reduce", ("data", 2), payload=payload) == pytest.approx(two)
    assert seconds(timed, "all_reduce", ("data", 4), payload=payload) == pytest.approx(four)


def test_models_beyond_what_was_measured() -> None:
    timed = cluster({**INNER, "joins": 8}, OUTER, measured=MEASURED)
    for verb, ranks in (("all_gather", 2), ("all_reduce", 16)):
        plain = seconds(cluster({**INNER, "joins": 8}, OUTER), verb, ("data", ranks))
        assert seconds(timed, verb, ("data", ranks)) == plain
    across = ("data", 2), ("tensor", 8)
    assert seconds(timed, "all_reduce", *across) == seconds(
        cluster({**INNER, "joins": 8}, OUTER), "all_reduce", *across
    )


def test_measured_messages() -> None:
    network = ClusterNetwork(cluster(INNER, measured=MEASURED), "torch", Grid((("pipe", 4), ("data", 2))))
    assert network.message(2, 4, 2000) == pytest.approx(1e-4)


def test_turns_on_cores_count_beyond_those_of_the_measurement() -> None:
    shared = cluster(INNER, measured=MEASURED, cores=2)
    assert seconds(shared, "all_reduce", ("data", 2), payload=1000) == pytest.approx(1e-4)
    assert seconds(shared, "all_reduce", ("data", 2), ("pipe", 2), payload=1000) == pytest.approx(2e-4)
    assert seconds(shared, "all_reduce", ("data", 8), payload=1000) == pytest.approx(4e-4)
    assert seconds(shared, "send", ("data", 4)) == pytest.approx(2 * (BIG / B + A))


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"backend=mpi has no links in the cluster made-up; valid: torch"):
        ClusterNetwork(FLAT, "mpi", Grid((("data", 2),)))
    with pytest.raises(ConfigError, match=r"layout=8 ranks has more ranks than the cluster has devices; valid: <= 4"):
        ClusterNetwork(cluster({**INNER, "joins": 4}), "torch", Grid((("data", 8),)))
    with pytest.raises(AssertionError, match="alltoall: nobody knows"):
        seconds(FLAT, "alltoall", ("data", 2))


GRIDS = st.lists(st.sampled_from((1, 2, 3, 4, 8)), min_size=3, max_size=3)
LEVELS: list[tuple[dict[str, Any], ...]] = [
    (INNER,),
    ({**INNER, "joins": 4}, OUTER),
    ({**INNER, "joins": 3, "kind": "ring"}, {**INNER, "joins": 2, "bandwidth": 5e10}, OUTER),
]


@given(GRIDS, st.sampled_from(LEVELS), st.sampled_from(sorted(VERBS)), st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_bytes_take_no_less(
    sizes: list[int], levels: tuple[dict[str, Any], ...], verb: str, payload: int, more: int
) -> None:
    network = ClusterNetwork(
        cluster(*levels), "torch", Grid(tuple(zip(("data", "pipe", "tensor"), sizes, strict=True)))
    )
    for axes in ("data", "pipe", "tensor", "data+tensor", "ends"):
        assert 0 <= network.collective(axes, verb, payload) <= network.collective(axes, verb, payload + more)


@given(st.sampled_from(LEVELS), st.sampled_from(sorted(VERBS)), st.integers(0, 10**9))
def test_more_ranks_take_no_less(levels: tuple[dict[str, Any], ...], verb: str, payload: int) -> None:
    """More ranks in full units take no less. Partly filled units are predicted as slow as full units, or slower."""
    unit = levels[0].get("joins", 5)
    numbers = [*range(1, unit + 1), *(unit * nodes for nodes in ((2, 4, 6, 8) if len(levels) > 2 else (2, 3, 4, 5)))]
    times = [seconds(cluster(*levels), verb, ("data", ranks), payload=payload) for ranks in numbers]
    assert all(fewer <= more * (1 + 1e-9) for fewer, more in pairwise(times)), times


def counted(grid: Grid, axes: str, levels: tuple[dict[str, Any], ...]) -> float:
    """Return the seconds of a ring's step: the slowest unit of all levels, by the number of groups that leave the
    unit."""
    groups, slowest, size = grid.groups(*axes.split("+")), 0.0, 1
    if "ends" in axes:  # the stages between send nothing
        groups = [ranks for ranks in groups if grid.coordinates(ranks[0])["pipe"] == 0]
    for level in levels:
        unit, upper = size, size * level.get("joins", grid.world_size)
        size = upper
        leaving = Counter(
            number
            for ranks in groups
            for number in {rank // unit for rank in ranks}
            if any(rank // unit != number and rank // upper == number * unit // upper for rank in ranks)
        )
        for count in leaving.values():
            slowest = max(slowest, level["latency"] + BIG * count / level["bandwidth"])
    return slowest


@given(GRIDS, st.sampled_from(LEVELS))
def test_links_are_shared_by_all_who_cross(sizes: list[int], levels: tuple[dict[str, Any], ...]) -> None:
    """Equally placed groups, and repeated blocks, are counted once, with the result of counting all groups."""
    copies = ("tensor", 2) if sizes[2] % 2 == 0 else None
    grid = Grid(tuple(zip(("data", "pipe", "tensor"), sizes, strict=True)), copies)
    shared = ("copies", "data+copies") if copies else ()
    for axes in ("data", "pipe", "tensor", "data+tensor", "data+pipe", "ends", "data+ends", *shared):
        expected = pytest.approx(counted(grid, axes, levels))
        assert ClusterNetwork(cluster(*levels), "torch", grid).collective(axes, "send", BIG) == expected, axes
