"""Messages inside of nodes and between nodes: the paper's equations 4 to 7, and the ledgers of every verb.

The condition of equation 4 and 5 (branch outermost) is printed to us as n_g <= n_node for n and n(g-1) messages.
Counting says n_g >= n_node: if several sub-grids share a node (n_g < n_node), n_node/n_g ranks of a segment share a
node, and n n_node/n_g = n_node g messages stay there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest
import torch

from meshwright.compute.models.chain import chain_of
from meshwright.compute.subgraph.segment import Segment
from meshwright.config import Config
from meshwright.planner.plan.network import Volume, volumes
from meshwright.ranks.comm import Comm
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Ledger, Traffic
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.tools.verify.job import comparable
from meshwright.training.decisions import resolve_process, this_machine
from meshwright.training.step import backward
from tests.harness import build, counted_step
from tests.orders import config_for
from tests.workers import run_ranks

MOST_RANKS = 64


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def grid_of(n: int, g: int, *, innermost: bool) -> Grid:
    axes = (("data", n // g), ("branch", g))
    return Grid(axes if innermost else axes[::-1])


def split(grid: Grid, rank: int, *, common: str = "all") -> Ledger:
    """Return a rank's sends when a batch of the rank's replica enters the branches: 8 rows of 4 bytes."""
    mesh = planned_mesh(grid, rank, ("data", "branch"))
    segment = Segment(mesh, num_rows=None if common == "all" else 8)
    segment.enter(torch.empty(8, device="meta"))
    return mesh.ledger


@cache
def split_everywhere(n: int, g: int, *, innermost: bool) -> list[Ledger]:
    grid = grid_of(n, g, innermost=innermost)
    return [split(grid, rank) for rank in range(n)]


def added(parts: Iterable[Volume]) -> Volume:
    return sum(parts, Volume())


def total(grid: Grid, ranks_per_node: int, rank: int, traffic: Mapping[tuple[str, str], Traffic]) -> Volume:
    """Return a rank's messages over all axes and verbs."""
    return added(volumes(grid, ranks_per_node, rank, traffic).values())


def counted(n: int, g: int, n_node: int, *, innermost: bool) -> tuple[int, int]:
    """Return the messages of a split by all ranks, inside of nodes and between nodes."""
    grid = grid_of(n, g, innermost=innermost)
    ledgers = split_everywhere(n, g, innermost=innermost)
    volume = added(total(grid, n_node, rank, ledger.traffic) for rank, ledger in enumerate(ledgers))
    return volume.messages_inside, volume.messages_between


def naive(n: int, g: int, n_node: int) -> tuple[int, int]:
    """Equations 4 and 5, with the condition as counted."""
    n_g = n // g
    return (n, n * (g - 1)) if n_g >= n_node else (n_node * g, (n - n_node) * g)


def topology_aware(n: int, g: int, n_node: int) -> tuple[int, int]:
    """Equations 6 and 7."""
    return (n * g, 0) if g <= n_node else (n * n_node, n * (g - n_node))


def even(a: int, b: int) -> bool:
    """Whether the smaller divides the greater."""
    return max(a, b) % min(a, b) == 0


def cases(n: int) -> Iterator[tuple[int, int]]:
    """g and n_node for n ranks. A segment of one rank sends nothing, not even to itself."""
    return ((g, n_node) for g in divisors(n) if g > 1 for n_node in divisors(n))


FEW = (2, 4, 8, 12, 16, 24, 32, 36, 48, 60, 64)
"""Cases that do not wait for --long."""


@pytest.mark.parametrize(
    "n", [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in range(2, MOST_RANKS + 1)]
)
def test_equations_4_to_7(n: int) -> None:
    for g, n_node in cases(n):
        apart, close = counted(n, g, n_node, innermost=False), counted(n, g, n_node, innermost=True)
        assert sum(apart) == sum(close) == n * g
        if even(n // g, n_node):
            assert apart == naive(n, g, n_node), (g, n_node)
        if even(g, n_node):
            assert close == topology_aware(n, g, n_node), (g, n_node)
            assert close[1] <= apart[1]


def test_several_sub_grids_share_a_node() -> None:
    """On 8 ranks, 4 sub-grids of 2, 4 ranks a node, the printed condition of equations 4 and 5 gives 8 and 24."""
    assert counted(8, 4, 4, innermost=False) == (16, 16)
    assert counted(8, 4, 4, innermost=True) == (32, 0)


@pytest.mark.parametrize("innermost", [False, True])
def test_common_layers_on_one_rank(innermost: bool) -> None:
    """In a split of D&SP-cSub only the first rank of a segment sends, to each rank of the segment. 8 ranks, 4
    sub-grids, 2 a node."""
    grid = grid_of(8, 4, innermost=innermost)
    sent = [total(grid, 2, rank, split(grid, rank, common="one").traffic) for rank in range(8)]
    first = [volume for rank, volume in enumerate(sent) if grid.index(rank, "branch") == 0]
    inside = 2 if innermost else 1  # the rank itself, and one more of four if branches are close
    assert first == [Volume(inside, 4 - inside, 32 * (inside - 1), 32 * (4 - inside))] * 2
    assert added(sent) == added(first)


SIX = Grid((("line", 6),))
"""On nodes of 4 and 2; rank 4 is the first of the second."""


def called(verb: str, comm: Comm) -> None:
    """Call a verb with 24 elements in all, 4 bytes each."""
    whole, part = torch.empty(24, device="meta"), torch.empty(4, device="meta")
    match verb:
        case "all_reduce":
            comm.all_reduce(whole)
        case "all_gather":
            comm.all_gather(whole, part)
        case "reduce_scatter":
            comm.reduce_scatter(part, whole)
        case "all_to_all":
            comm.all_to_all(whole, whole)
        case "broadcast":
            comm.broadcast(whole, 4)
        case "reduce":
            comm.reduce(whole, 4)
        case "gather":
            comm.gather(whole, part, 4)
        case "scatter":
            comm.scatter(part, whole, 4)
        case "exchange":
            comm.exchange(part, (comm.index + 1) % 6, part, (comm.index - 1) % 6)
        case "send":
            comm.send(part, 0)


VERBS = {
    # From rank 4, the root; from rank 3, the neighbour on the other node.
    "all_reduce": (Volume(4, 8, 32, 128), Volume(8, 4, 96, 64)),
    "all_gather": (Volume(2, 4, 16, 64), Volume(4, 2, 48, 32)),
    "reduce_scatter": (Volume(2, 4, 16, 64), Volume(4, 2, 48, 32)),
    "all_to_all": (Volume(2, 4, 16, 64), Volume(4, 2, 48, 32)),
    "broadcast": (Volume(2, 4, 96, 384), Volume()),
    "reduce": (Volume(1, 0, 0, 0), Volume(0, 1, 0, 96)),
    "gather": (Volume(1, 0, 0, 0), Volume(0, 1, 0, 16)),
    "scatter": (Volume(2, 4, 16, 64), Volume()),
    "exchange": (Volume(1, 0, 16, 0), Volume(0, 1, 0, 16)),
    "send": (Volume(0, 1, 0, 16), Volume(1, 0, 16, 0)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb(verb: str) -> None:
    for rank, expected in zip((4, 3), VERBS[verb], strict=True):
        mesh = planned_mesh(SIX, rank, ())
        called(verb, mesh.comm("line"))
        volume = total(SIX, 4, rank, mesh.ledger.traffic)
        assert volume == expected
        assert volume.bytes_inside + volume.bytes_between == mesh.ledger.sent_bytes()["line"]


Sent = dict[tuple[str, str], Traffic]


def real(mesh: Mesh, config: Config) -> Sent:
    """Return a step's sends, without the optimizer's norm."""
    parts = build(config, mesh)
    mesh.ledger.traffic.clear()
    shapes = chain_of(config).sample_shapes(config)
    backward(parts, {name: torch.ones(config.batch.global_, *shape).long() for name, shape in shapes.items()})
    parts.strategy.finish()
    parts.strategy.publish()
    return dict(mesh.ledger.traffic)


def between(config: Config, ledgers: list[Sent]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return all ranks' messages inside of nodes of two ranks and between nodes, by axis and verb."""
    every = [volumes(Grid(config.layout.axes), 2, rank, ledger) for rank, ledger in enumerate(ledgers)]
    sums = {key: added(own[key] for own in every if key in own) for key in {k for v in every for k in v}}
    return {key: (volume.messages_inside, volume.messages_between) for key, volume in sums.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["branch-pipe", "branch-data"])
def test_a_run_sends_what_was_planned(order: str) -> None:
    """Every call, byte and peer of four ranks; stages that are close, branches that are not."""
    config = config_for(order)
    ran = run_ranks(real, Grid(config.layout.axes), config, token_axes=config.layout.token_axes)
    planned = [dict(counted_step(config, rank).mesh.ledger.traffic) for rank in range(4)]
    assert ran == planned
    counts = between(config, ran)
    if order == "branch-pipe":
        assert counts["pipe", "message"] == (8, 0)  # two microbatches, forward and back, of two branches
    trades = [counts[key] for key in counts if key[0] == "branch"]
    assert trades
    assert all(inside == outside > 0 for inside, outside in trades)  # the rank itself on the node, the peer on another


@pytest.mark.parametrize("q, b", [(4, 2), (4, 1), (6, 2), (6, 3), (8, 4)])
def test_blocks_of_a_square_share_a_node(q: int, b: int) -> None:
    """Nodes have b x b ranks of a square of q x q: in a row or column, q - b of a rank's q - 1 peers are elsewhere."""
    size = b * b
    square = (("row", q), ("col", q))
    blocks = Grid(square, nesting=(("row", q // b), ("col", q // b), ("row", b), ("col", b)))
    sent = 1000 * (q - 1)
    ledger = {(axis, "all_gather"): Traffic(1, sent) for axis, _ in square}
    for rank in range(q * q):
        by_verb = volumes(blocks, size, rank, ledger)
        assert {volume.bytes_between for volume in by_verb.values()} == {1000 * (q - b)}
        assert {volume.messages_inside for volume in by_verb.values()} == {b}
        assert {blocks.coordinates(rank)[axis] // b for axis in ("row", "col")} == {
            blocks.coordinates(rank - rank % size)[axis] // b for axis in ("row", "col")
        }


def test_nodes_are_the_launcher_s() -> None:
    config = config_for("branch-data")
    given = config.layout.model_copy(update={"ranks_per_node": 2})
    with pytest.raises(
        ConfigError, match=r"ranks_per_node=2 does not match the 4 ranks .* on this node; valid: auto, 4"
    ):
        resolve_process(config.model_copy(update={"layout": given}), this_machine())
    resolve_process(
        config.model_copy(update={"layout": given.model_copy(update={"ranks_per_node": 4})}), this_machine()
    )


def test_what_is_verified_here_may_be_meant_for_other_nodes() -> None:
    config = config_for("branch-data")
    given = config.layout.model_copy(update={"ranks_per_node": 2})
    resolve_process(comparable(config.model_copy(update={"layout": given}), as_configured=False), this_machine())
