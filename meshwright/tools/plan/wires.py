"""Seconds of collectives and messages: latency and bandwidth, level by level, of the algorithm that a library takes.

A group has u units at a level (n ranks in all), whose links have latency a and leave it b bytes a second; S is the
whole payload. It goes over several levels one after another (a sum over levels), or as one ring over all of them
(`slowest`: the least b; `once`: the latencies of the n - 1 steps of a ring, of which most go over inner links).

| verb                       | seconds, the least of                                                                 |
|----------------------------|---------------------------------------------------------------------------------------|
| all-gather, reduce-scatter | ring: (n-1)/n S / slowest + once; levels: sum (u-1)/u S / b + (u-1) a                 |
| all-reduce                 | ring, levels: twice that; on a level a tree, where it is less: 2 log2(u) (a + S / b)  |
| broadcast, reduce          | chain: S / slowest + once; tree: sum log2(u) (a + S / b)                              |
| all-to-all                 | pairs: sum over levels of peers there x (a + members x S/n / b), on a ring farther    |
| gather, scatter            | pairs: sum over levels of peers there x (a + S/n / b)                                 |
| send, of a ring            | a + S / b of the slowest step                                                         |

Sources: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, IJHPCA 2005,
sections 2 to 4; Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009; NCCL's cost model
(src/graph/tuning.cc: the lesser of rings, whose latency counts inner and outer steps apart, and trees).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import ceil, exp, log, log2

from meshwright.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.tools.plan.cluster import Backend, Cluster, Curve
from meshwright.tools.plan.kernels import turns
from meshwright.tools.plan.shape import Shape, Span, Tiers


class Wires:
    """What a job's ranks send over a cluster. `overlaps`: the part of a collective that goes on under computation.

    Measured times (`Links.measured`) go before models, for groups of neighbours (shape.py). Between numbers of ranks,
    and between payloads, they follow straight lines over logarithms; beyond the largest payload its bandwidth holds,
    before the smallest its seconds; beyond the numbers of ranks the models do. Where ranks share cores, everything
    takes as many times as long as there are ranks to a core; a measurement has its own ranks' part in it already.
    """

    def __init__(self, cluster: Cluster, backend: Backend, grid: Grid) -> None:
        """Raises ConfigError where the cluster has no links of this backend, or too few devices for the grid."""
        if backend not in cluster.links:
            rule = f"has no links in the cluster {cluster.name}"
            raise ConfigError.of("backend", backend, rule, ", ".join(cluster.links))
        links = cluster.links[backend]
        self.overlaps = links.overlaps
        self._cluster, self._grid, self._tiers = cluster, grid, Tiers(links.levels)
        self._tiers.check(grid.world_size)
        self._measured: dict[tuple[str, int], Curve] = {
            (entry.verb, entry.ranks): entry.points for entry in links.measured
        }
        self._shapes: dict[str, list[Shape]] = {}
        self._seconds: dict[tuple[str, str, int], float] = {}
        self._shapes_of_steps: dict[tuple[int, int], Shape] = {}
        outermost = self._tiers.sizes[-1]
        self._turns = turns(cluster, min(grid.world_size, outermost) if outermost > 1 else grid.world_size)

    def collective(self, axes: str, verb: str, payload_bytes: int) -> float:
        """Seconds of a collective over `axes` (`data`, `row+depth`) of the slowest group, while all groups over these
        axes do the same. `payload_bytes`: of the whole tensor, as in ledger.py."""
        key = (axes, verb, payload_bytes)
        if key not in self._seconds:
            if axes not in self._shapes:
                self._shapes[axes] = self._tiers.shapes(self._grid, axes.split("+"))
            self._seconds[key] = max(self._group(shape, verb, payload_bytes) for shape in self._shapes[axes])
        return self._seconds[key]

    def message(self, sender: int, receiver: int, payload_bytes: int) -> float:
        """Seconds of a pipeline's message, while all who share links with the sender send as far along the pipe."""
        key = (sender, receiver)
        if key not in self._shapes_of_steps:
            self._shapes_of_steps[key] = self._tiers.step(self._grid, sender, receiver)
        return self._group(self._shapes_of_steps[key], "message", payload_bytes)

    def _group(self, shape: Shape, verb: str, payload_bytes: int) -> float:
        assert verb in VERBS, f"{verb}: nobody knows how it goes over links"
        if shape.size == 1:
            return 0.0
        measured = self._timed(verb, shape.size, payload_bytes) if shape.close else None
        return self._turns * VERBS[verb](shape, payload_bytes) if measured is None else measured

    def _timed(self, verb: str, num_ranks: int, payload_bytes: int) -> float | None:
        """As measured; None beyond the numbers of ranks with which it was."""
        numbers = sorted(ranks for name, ranks in self._measured if name == verb)
        fewer = [number for number in numbers if number <= num_ranks]
        more = [number for number in numbers if number >= num_ranks]
        if not fewer or not more:
            return None
        points = [
            (number, timed(self._measured[verb, number], payload_bytes) * self._turns / turns(self._cluster, number))
            for number in sorted({fewer[-1], more[0]})
        ]
        return timed(points, num_ranks)


def timed(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x: between points a power of x, before the first its y, beyond the last in proportion to x."""
    after = bisect_left(points, x, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    x0, y0 = points[after - 1]
    if after == len(points):
        return y0 * x / x0
    x1, y1 = points[after]
    return y0 * exp(log(y1 / y0) * log(x / x0) / log(x1 / x0))


def _ring(shape: Shape, payload_bytes: float) -> float:
    """n - 1 steps of a ring through all ranks, in each of which everyone passes 1/n of the payload on."""
    return (shape.size - 1) / shape.size * payload_bytes / _slowest(shape) + _once(shape)


def _slowest(shape: Shape) -> float:
    return min(span.bandwidth for span in shape.spans)


def _once(shape: Shape) -> float:
    """The latencies between the first and the last of a ring that is cut open at its quickest step."""
    return sum(span.hops * span.latency for span in shape.spans) - min(span.latency for span in shape.spans)


def _exchange(span: Span, payload_bytes: float) -> float:
    """The ring at one level alone."""
    return (span.units - 1) * (payload_bytes / span.units / span.bandwidth + span.latency)


def _doubling(span: Span, payload_bytes: float) -> float:
    """A tree over one level's units: every step carries the payload."""
    return ceil(log2(span.units)) * (payload_bytes / span.bandwidth + span.latency)


def _gathered(shape: Shape, payload_bytes: float) -> float:
    return min(_ring(shape, payload_bytes), sum(_exchange(span, payload_bytes) for span in shape.spans))


def _all_reduced(shape: Shape, payload_bytes: float) -> float:
    """Inside of each unit a reduce-scatter, its mirror afterwards; between them the same one level further out."""
    levels = sum(min(_exchange(span, payload_bytes), _doubling(span, payload_bytes)) for span in shape.spans)
    return 2 * min(_ring(shape, payload_bytes), levels)


def _rooted(shape: Shape, payload_bytes: float) -> float:
    chain = payload_bytes / _slowest(shape) + _once(shape)
    return min(chain, sum(_doubling(span, payload_bytes) for span in shape.spans))


def _all_to_all(shape: Shape, payload_bytes: float) -> float:
    """Each rank exchanges 1/n of its payload with each other. On a ring of u units its parts pass (u/2)^2 links in
    all, where a switch's pass u - 1."""
    seconds = 0.0
    for span in shape.spans:
        farther = span.units**2 // 4 / (span.units - 1) if span.ring else 1.0
        part = span.members * payload_bytes / shape.size
        seconds += span.peers * (farther * part / span.bandwidth + span.latency)
    return seconds


def _parted(shape: Shape, payload_bytes: float) -> float:
    part = payload_bytes / shape.size
    return sum(span.peers * (part / span.bandwidth + span.latency) for span in shape.spans)


def _passed(shape: Shape, payload_bytes: float) -> float:
    return max(payload_bytes / span.bandwidth + span.latency for span in shape.spans)


VERBS: Mapping[str, Callable[[Shape, float], float]] = {
    "all_gather": _gathered,
    "reduce_scatter": _gathered,
    "all_reduce": _all_reduced,
    "broadcast": _rooted,
    "reduce": _rooted,
    "all_to_all": _all_to_all,
    "gather": _parted,
    "scatter": _parted,
    "send": _passed,
    "message": _passed,
}
"""Seconds of a group's collective by verb: of ledger.py's, and a pipeline's message, whose shape has one span."""
