"""Seconds of collectives and messages: latency and bandwidth, level by level, of the algorithm that a library takes.

Groups and units: a unit of level 0 is a device, and level l joins units into one unit of level l + 1. Ranks fill units
in order: rank r is in unit r // (devices of a unit). Two ranks are connected at the innermost level with both ranks in
the next unit, and send over that level's links alone.

Seconds: a group has u units at a level (n ranks in all), with links of latency a and b bytes a second for the group. S
is the whole payload. A collective runs level by level (a sum over levels), or as one ring over all levels (`slowest`:
the least b; `once`: the latencies of the n - 1 steps of a ring, most of these over inner links).

| verb                       | seconds, the least of                                                                 |
|----------------------------|---------------------------------------------------------------------------------------|
| all-gather, reduce-scatter | ring: (n-1)/n S / slowest + once; levels: sum (u-1)/u S / b + (u-1) a                 |
| all-reduce                 | ring, levels: twice that; on a level a tree, if faster: 2 log2(u) (a + S / b)         |
| broadcast, reduce          | chain: S / slowest + once; tree: sum log2(u) (a + S / b)                              |
| all-to-all                 | pairs: sum over levels of peers there x (a + members x S/n / b), on a ring farther    |
| gather, scatter            | pairs: sum over levels of peers there x (a + S/n / b)                                 |
| send, of a ring            | a + S / b of the slowest step                                                         |

Rows to experts that a kernel sends once (Rows; dispatched.py): S bytes, each token once to each of its ranks. A
domain is the levels at which a rank sends at half of the innermost level's pace or faster (NVLink). A token goes once
to each domain over the network, and is forwarded there, while other tokens are sent: the longer of both counts.

| medium          | bytes out of a rank of a group of n in d domains of m    | bytes a second                          |
|-----------------|----------------------------------------------------------|-----------------------------------------|
| in the domain   | (m-1)/m S                                                | links', at most `per_sm` a SM           |
| between domains | (d-1)/d S x a token's domains / a token's ranks          | links' x `between`                      |

Sources: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 2005,
sections 2 to 4; Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009; NCCL's cost model
(src/graph/tuning.cc: the lesser of trees and of rings with separate latencies of inner and outer steps).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from math import ceil, log2
from typing import NamedTuple

from meshwright.planner.plan.cluster import Cluster, Curve, Level, interpolated
from meshwright.planner.plan.expert_ranks import Choice, Dispatcher, units_of
from meshwright.planner.plan.remembered import remembered
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import ENDS, HEAD_COPIES, PIPE, Grid
from meshwright.ranks.ledger import VERBS, Traffic
from meshwright.ranks.transports import TransportName


@dataclass(frozen=True)
class _Span:
    """A group at a level that connects its ranks. If units hold different numbers of ranks, fields are maxima."""

    units: int
    """Units of the level that the group occupies, in one unit of the next level."""
    members: int
    """The group's ranks in one unit."""
    peers: int
    """Ranks that a rank reaches over these links."""
    hops: int
    """Steps of a ring through the group over these links."""
    latency: float
    bandwidth: float
    """Bytes a second out of a unit for the group, while the other groups over the same axes also send."""
    ring: bool


@dataclass(frozen=True)
class _Shape:
    """A group of `size` ranks by its spans, innermost first. `close`: its ranks are neighbours: consecutive, or all in
    one unit that the innermost level joins."""

    size: int
    spans: tuple[_Span, ...]
    close: bool


class Kernels(NamedTuple):
    """A dispatcher's kernels. `sms`: multiprocessors that the kernels take; `per_sm`: bytes a second that one sends to
    its domain; `between`: the share of the links' pace that is reached between domains, by their number; 0: of more."""

    sms: int
    per_sm: float
    between: Mapping[int, float]


DISPATCHERS: Mapping[Dispatcher, Kernels] = {
    # Megatron-LM, core/transformer/transformer_config.py: moe_deepep_num_sms. deepseek-ai/DeepEP,
    # docs/README_Hybrid-EP.md, B200: 494 and 420 GB/s there and back with 24 multiprocessors, of which 7/8 leave the
    # rank. docs/legacy.md, CX7 ports of 50 GB/s: 43, 57.5 and 50.5 GB/s of 2, 4 and 8 nodes, of which 1/2, 3/4 and 7/8
    # leave the node: of 46 GB/s 0.47, 0.94 and 0.96.
    "deepep": Kernels(20, 1.67e10, {2: 0.47, 0: 0.95}),
    # moe_hybridep_num_sms. README_Hybrid-EP.md, kernels alone, GB200: 750 and 684 GB/s of 8 ranks with 16
    # multiprocessors, of which 7/8 leave the rank; H100, 16 multiprocessors: 67.3, 57.6 and 49.9 GB/s of 2, 4, 8 nodes.
    "hybridep": Kernels(16, 3.92e10, {2: 0.73, 0: 0.94}),
}


class Rows(NamedTuple):
    """How rows are sent to experts. `choice`: the router's; `parts`: the ranks that cut one expert; `sms`: as in
    Kernels."""

    dispatcher: Dispatcher
    choice: Choice
    parts: int
    sms: int


def are_rows(axes: str, verb: str) -> bool:
    """Whether a layer's collective is of rows to experts. Sequences are traded over the context axis alone."""
    return verb == "all_to_all" and axes != "context"


@dataclass(frozen=True)
class Tiers:
    """A cluster's levels, and the assignment of a run's ranks to units."""

    levels: tuple[Level, ...]
    grid: Grid

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of devices in a unit of each level."""
        sizes = [1]
        for level in self.levels[:-1]:
            assert level.joins is not None, level
            sizes.append(sizes[-1] * level.joins)
        return tuple(sizes)

    def check(self) -> None:
        """Raise ConfigError if the cluster has fewer devices than the grid has ranks."""
        joins, num_ranks = self.levels[-1].joins, self.grid.world_size
        if joins is not None and num_ranks > joins * self.sizes[-1]:
            rule = "has more ranks than the cluster has devices"
            raise ConfigError.of("layout", f"{num_ranks} ranks", rule, f"<= {joins * self.sizes[-1]}")

    def unit(self, rank: int, level: int) -> int:
        """Return the number of the level's unit that holds the rank. After the last level one unit holds all ranks."""
        return rank // self.sizes[level] if level < len(self.sizes) else 0

    def meeting(self, rank: int, peer: int) -> int:
        """Return the level whose links connect two ranks."""
        return next(n for n in range(len(self.levels)) if self.unit(rank, n + 1) == self.unit(peer, n + 1))

    @remembered()
    def shapes(self, joined: str) -> list[_Shape]:
        """Return the distinct shapes of the groups over the axes in `joined` (`data`, `row+depth`): one shape if
        numbers of ranks and of devices in a unit divide each other."""
        grid, axes = self.grid, joined.split("+")
        offsets = grid.group(0, *axes)
        if len(offsets) == 1:
            return [_Shape(1, (), close=True)]
        if not {HEAD_COPIES, ENDS} & set(axes) and self._is_even():
            # All groups have equal shapes, so rank 0's represents them. A unit's links are shared by all groups in the
            # unit.
            groups = [_Group(self, offsets)]
            sharing = [size // most for size, most in zip(self.sizes, groups[0].members, strict=False)]
            return [groups[0].shape(lambda level, unit: sharing[level])]
        # Stand-ins: ENDS is the first and the last stage; HEAD_COPIES a run of neighbours on the copied axis.
        group_axes = {*axes, PIPE} if ENDS in axes else set(axes)
        runs = [0]  # for an axis whose groups are runs of neighbours
        if grid.copies and HEAD_COPIES in axes and grid.copies[0] not in axes:
            group_axes.add(grid.copies[0])
            runs = list(grid.group(0, grid.copies[0])[:: grid.copies[1]])
        others = grid.group(0, *(name for name in grid.names if name not in group_axes))
        firsts = tuple(sorted(first + run for first in others for run in runs))
        # The pattern repeats at multiples of a block of whole groups and the outermost unit.
        inward = dropwhile(lambda axis: axis[0] not in group_axes, grid.nesting)
        window = math.lcm(math.prod(size for _, size in inward), self.sizes[-1])
        firsts = tuple(first for first in firsts if first < window)
        groups = [_Group(self, [first + offset for offset in offsets]) for first in firsts]
        crossing = Counter((level, unit) for group in groups for level, unit in group.crossed)
        return list(dict.fromkeys(group.shape(lambda level, unit: crossing[level, unit]) for group in groups))

    @remembered()
    def step(self, sender: int, receiver: int) -> _Shape:
        """Return two ranks as a group, while every rank in the sender's unit sends equally far along the pipe."""
        grid = self.grid
        # The innermost level with both stages connects them, so a neighbour on the same node needs no network.
        level_index = self.meeting(sender, receiver)
        level, size = self.levels[level_index], self.sizes[level_index]
        far = grid.coordinates(receiver)[PIPE] - grid.coordinates(sender)[PIPE]
        first = sender // size * size
        unit = range(first, min(first + size, grid.world_size))
        places = [(rank, grid.coordinates(rank)) for rank in unit]
        # All senders of the unit share its links while the pipeline is full.
        sends = [(rank, coordinates | {PIPE: coordinates[PIPE] + far}) for rank, coordinates in places]
        crossing = sum(
            self.meeting(rank, grid.rank(to)) == level_index for rank, to in sends if 0 <= to[PIPE] < grid.size(PIPE)
        )
        span = _Span(2, 1, 1, 2, level.latency_seconds, level.share(crossing, 2, 1), level.kind == "ring")
        return _Shape(2, (span,), close=level_index == 0 or abs(receiver - sender) == 1)

    def _is_even(self) -> bool:
        """Return whether units and the grid's inner axes divide each other at every level, so all groups have equal
        shapes.

        Then one group represents a million ranks. Nodes of six are the counterexample: rank 0's group of four is inside
        of a node, and the next one crosses.
        """
        for size in self.sizes:
            left = min(size, self.grid.world_size)
            for _, axis in reversed(self.grid.nesting):
                left, rest = (left // axis, left % axis) if left > axis else (1, axis % left)
                if rest:
                    return False
        return True


class _Group:
    """A group's ranks, counted by unit.

    Attributes:
        counts: The number of ranks in each unit, by level; the last entry is the unit of all.
        members: The most ranks in a unit, by level.
        crossed: (level, unit) of each unit out of which the group sends.
    """

    def __init__(self, tiers: Tiers, ranks: Sequence[int]) -> None:
        self._tiers, self._ranks = tiers, ranks
        self.counts = [Counter(tiers.unit(rank, level) for rank in ranks) for level in range(len(tiers.levels) + 1)]
        self.members = [max(count.values()) for count in self.counts]
        # By level: for each unit of the next, the units of this one in it.
        self._inner: list[dict[int, list[int]]] = []
        for level, size in enumerate(tiers.sizes):
            inner = defaultdict(list)
            for unit in self.counts[level]:
                inner[tiers.unit(unit * size, level + 1)].append(unit)
            self._inner.append(inner)
        self.crossed = [
            (level, unit)
            for level, inner in enumerate(self._inner)
            for units in inner.values()
            if len(units) > 1
            for unit in units
        ]

    def shape(self, sharing: Callable[[int, int], int]) -> _Shape:
        """Return the group's shape. `sharing`: the number of groups that send out of a unit of a level."""
        # Steps of a ring that leave a unit, by level.
        rings = [len(count) if len(count) > 1 else 0 for count in self.counts]
        crossed: defaultdict[int, list[int]] = defaultdict(list)
        for level_index, unit in self.crossed:
            crossed[level_index].append(unit)
        spans = tuple(
            _Span(
                units=(num_units := max(map(len, self._inner[level_index].values()))),
                members=self.members[level_index],
                peers=self.members[level_index + 1] - min(self.counts[level_index][unit] for unit in units),
                hops=rings[level_index] - rings[level_index + 1],
                latency=level.latency_seconds,
                bandwidth=level.share(
                    max(sharing(level_index, unit) for unit in units), num_units, self.members[level_index]
                ),
                ring=level.kind == "ring",
            )
            for level_index, level in enumerate(self._tiers.levels)
            if (units := crossed[level_index])
        )
        consecutive = self._ranks[-1] - self._ranks[0] == len(self._ranks) - 1
        return _Shape(len(self._ranks), spans, close=consecutive or len(self._inner[0]) == 1)


class ClusterNetwork:
    """Seconds of a job's collectives on a cluster. `overlaps`: the share of a collective that runs during computation;
    `tax`: the share by which kernels take longer meanwhile; `channels`: of a communicator.

    Measured times (`Links.measured`) replace models for groups of neighbours (`Shape.close`). Between numbers of ranks
    and between payloads, interpolation is linear over logarithms. Beyond the largest payload the bandwidth is constant,
    below the smallest the seconds. Beyond the measured numbers of ranks models are used. If ranks share cores, modelled
    seconds are multiplied by the number of ranks to a core; measured seconds include the measured ranks' sharing."""

    def __init__(self, cluster: Cluster, backend: TransportName, grid: Grid, rows: Rows | None = None) -> None:
        """`rows`: how rows are sent to experts; None: by all-to-alls.

        Raises:
            ConfigError: The cluster has no links of this backend, or too few devices for the grid.
        """
        if backend not in cluster.links:
            rule = f"has no links in the cluster {cluster.name}"
            raise ConfigError.of("backend", backend, rule, ", ".join(cluster.links))
        links = cluster.links[backend]
        self._rows = rows
        self.overlaps, self.tax, self.channels = links.overlaps, links.tax, links.channels
        tiers = Tiers(links.levels, grid)
        tiers.check()
        self._cluster, self._tiers = cluster, tiers
        self._measured: dict[tuple[str, int], Curve] = {
            (entry.verb, entry.ranks): entry.points for entry in links.measured
        }
        outermost = tiers.sizes[-1]
        # On one node all ranks share the cores; with several nodes the ranks of one node do.
        self._slowdown = cluster.oversubscription(min(grid.world_size, outermost) if outermost > 1 else grid.world_size)

    @remembered()
    def collective(self, axes: str, verb: str, payload_bytes: int) -> float:
        """Seconds of a collective over `axes` (`data`, `row+depth`) of the slowest group, while all groups over these
        axes do the same. `payload_bytes`: of the whole tensor, as in ledger.py."""
        if self._rows is not None and are_rows(axes, verb):
            return max(_dispatched(shape, self._rows, payload_bytes) for shape in self._tiers.shapes(axes))
        return max(self._group(shape, verb, payload_bytes) for shape in self._tiers.shapes(axes))

    def ranks(self, axes: str) -> int:
        """Return the number of ranks in a group over `axes`."""
        return max(shape.size for shape in self._tiers.shapes(axes))

    @remembered()
    def neighbours(self, axes: str) -> int:
        """Return the most other ranks of a group over `axes` in a rank's unit of the innermost level, a node."""
        return _Group(self._tiers, self._tiers.grid.group(0, *axes.split("+"))).members[1] - 1

    def message(self, sender: int, receiver: int, payload_bytes: int) -> float:
        """Return the seconds of a pipeline's message, while all ranks that share links with the sender also send along
        the pipe."""
        return self._group(self._tiers.step(sender, receiver), "message", payload_bytes)

    def _group(self, shape: _Shape, verb: str, payload_bytes: int) -> float:
        """Return measured seconds of a group of neighbours, interpolated between measured numbers of ranks; else
        modelled seconds."""
        if shape.size == 1:
            return 0.0
        numbers = sorted(ranks for name, ranks in self._measured if name == verb and shape.close)
        fewer = [ranks for ranks in numbers if ranks <= shape.size]
        more = [ranks for ranks in numbers if ranks >= shape.size]
        # No extrapolation over ranks: algorithms change with the number of ranks, and the model has these.
        if not fewer or not more:
            return self._slowdown * _modelled(shape, verb, payload_bytes)
        # A measurement includes the sharing of cores by its ranks: this factor is replaced by this run's.
        cores = self._cluster.oversubscription
        points = [
            (
                ranks,
                interpolated(self._measured[verb, ranks], payload_bytes, power=True) * self._slowdown / cores(ranks),
            )
            for ranks in sorted({fewer[-1], more[0]})
        ]
        # Beyond the largest payload the bandwidth is constant.
        return interpolated(points, shape.size, power=True)


def _modelled(shape: _Shape, verb: str, payload_bytes: float) -> float:
    """Return the seconds of a group's collective by the table above, or of a pipeline's message (one span)."""
    spans, payload = shape.spans, payload_bytes
    if verb in ("send", "message"):
        return max(payload / span.bandwidth + span.latency for span in spans)
    if verb in ("gather", "scatter"):
        return sum(span.peers * (payload / shape.size / span.bandwidth + span.latency) for span in spans)
    if verb == "all_to_all":
        # Messages go to one peer after another: two receivers share no part of a payload, so there is no tree. On a
        # ring of u units a rank's messages pass (u/2)^2 links in all; on a switch, one hop each, u - 1.
        seconds = 0.0
        for span in spans:
            farther = span.units**2 // 4 / (span.units - 1) if span.ring else 1.0
            seconds += span.peers * (farther * (span.members * payload / shape.size) / span.bandwidth + span.latency)
        return seconds
    # A ring through all ranks, cut at its quickest step. n ranks make n steps around, and a collective takes n - 1
    # (NCCL's tuning.cc counts inner and outer steps separately).
    slowest = min(span.bandwidth for span in spans)
    once = sum(span.hops * span.latency for span in spans) - min(span.latency for span in spans)
    # A tree over one level's units: every step carries the payload.
    trees = [ceil(log2(span.units)) * (payload / span.bandwidth + span.latency) for span in spans]
    if verb in ("broadcast", "reduce"):
        return min(payload / slowest + once, sum(trees))
    ring = (shape.size - 1) / shape.size * payload / slowest + once  # each step passes 1/n of the payload on
    levels = [(span.units - 1) * (payload / span.units / span.bandwidth + span.latency) for span in spans]
    if verb in ("all_gather", "reduce_scatter"):
        return min(ring, sum(levels))
    assert verb == "all_reduce", f"{verb}: nobody knows how it goes over links"
    # Twice a reduce-scatter: around one ring, or level by level. In the latter each unit sums inside, the next level
    # sums these results, and the sums are returned. A tree sends the whole payload at each step and is faster if
    # latency dominates: small payloads, many units.
    return 2 * min(ring, sum(map(min, levels, trees)))


def _dispatched(shape: _Shape, rows: Rows, payload_bytes: float) -> float:
    """Seconds of rows that kernels send once to each rank, and once to each domain."""
    if shape.size == 1:
        return 0.0
    kernels, paces = DISPATCHERS[rows.dispatcher], [span.bandwidth / span.members for span in shape.spans]
    inner = [span for span, pace in zip(shape.spans, paces, strict=True) if 2 * pace >= paces[0]]
    members = math.prod(span.units for span in inner)
    pace = min(*paces[: len(inner)], rows.sms * kernels.per_sm)
    inside, domains, between = (1 - 1 / members) * payload_bytes / pace, shape.size // members, 0.0
    if domains > 1:
        once = units_of(rows.choice, domains) / units_of(rows.choice, shape.size // rows.parts) / rows.parts
        reached = kernels.between.get(domains, kernels.between[0])
        between = (1 - 1 / domains) * payload_bytes * once / (paces[-1] * reached)
    return max(inside, between) + sum(span.latency for span in shape.spans)


@dataclass(frozen=True)
class Volume:
    """Messages and bytes inside of nodes, and between them."""

    messages_inside: int = 0
    messages_between: int = 0
    bytes_inside: int = 0
    bytes_between: int = 0

    def __add__(self, volume: Volume) -> Volume:
        return Volume(
            self.messages_inside + volume.messages_inside,
            self.messages_between + volume.messages_between,
            self.bytes_inside + volume.bytes_inside,
            self.bytes_between + volume.bytes_between,
        )


def volumes(
    grid: Grid, ranks_per_node: int, rank: int, traffic: Mapping[tuple[str, str], Traffic]
) -> dict[tuple[str, str], Volume]:
    """Split a rank's ledger by axis and verb into messages inside of its node and to other nodes (SUPER, IPDPS 2021,
    equations 4 to 7; docs/subgraph.md).

    A collective counts as a direct message from each rank to each receiver; libraries choose trees and rings instead.
    As in the paper, a rank's part for itself counts as a message of no bytes inside of the node.
    """
    split: dict[tuple[str, str], Volume] = {}
    for (axis, verb), entry in traffic.items():
        ranks, direction = grid.group(rank, *axis.split("+")), VERBS[verb].direction
        index = ranks.index(rank)
        if direction == "to each":
            sends = [(ranks, entry.calls * VERBS[verb].passes, entry.sent_bytes)]
        else:
            sends = [
                (
                    (ranks if peer == index else ())
                    if direction == "from root"
                    else (ranks[peer if direction == "to root" else (index + peer) % len(ranks)],),
                    peer_traffic.calls,
                    peer_traffic.sent_bytes,
                )
                for peer, peer_traffic in entry.by_peer.items()
            ]
        volume = Volume()
        for receivers, messages, sent_bytes in sends:
            elsewhere = sum(receiver // ranks_per_node != rank // ranks_per_node for receiver in receivers)
            # Bytes are divided equally among all ranks except the sender, messages among all (SUPER counts the sender).
            between = sent_bytes * elsewhere // max(1, sum(receiver != rank for receiver in receivers))
            inside = messages * (len(receivers) - elsewhere)
            volume += Volume(inside, messages * elsewhere, sent_bytes - between, between)
        split[axis, verb] = volume
    return split
