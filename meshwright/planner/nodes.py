"""`meshwright doctor --nodes`: latency and bandwidth between a job's nodes, measured by its ranks.

    torchrun | srun | mpirun ... meshwright doctor --nodes [--cluster cluster.yaml --out nodes.yaml]

Measured pairs: the first ranks of each two hosts, and the first two ranks of each host. One pair is measured at a time,
without other traffic:

| measure   | of                                                                    |
|-----------|-----------------------------------------------------------------------|
| latency   | an exchange of 8 bytes, both ways at once                             |
| bandwidth | an exchange of up to 16 MiB, less the latency: bytes a second each way |

If two hosts cannot connect, the launch has failed before, with an error that names both hosts.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from meshwright.output.tables import print_table
from meshwright.output.terminal import table_console
from meshwright.planner.calibrate.report import writer_of
from meshwright.planner.plan.cluster import Cluster, Level, load_cluster
from meshwright.ranks.agreement import all_texts
from meshwright.ranks.comm import Comm
from meshwright.ranks.environment import cache_folder, chosen_interface, read_environment, starts_mpi
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.launch import Rank, Ranks, joined, run
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.torch_comm import TorchTransport
from meshwright.ranks.transports import TransportName
from meshwright.training.meeting import ranks_without

_SMALL_BYTES = 8
_FIRST_BYTES, _MOST_BYTES = 2**18, 2**24
_PAIR_SECONDS = 1.0
"""Approximate seconds of a pair's measurement: a slow link gets smaller messages."""
_WARM_UPS, _ROUNDS = 3, 15


@dataclass(frozen=True)
class NodeRank:
    """A rank and its host. `clock_seconds`: the host's clock minus rank 0's."""

    rank: int
    host: str
    interface: str
    address: str
    clock_seconds: float


@dataclass(frozen=True)
class NodePair:
    """Two ranks: seconds of a small exchange, bytes a second each way of a large one."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency: float
    bandwidth: float

    @property
    def within(self) -> bool:
        """Whether both ranks are on one host."""
        return self.hosts[0] == self.hosts[1]


@dataclass(frozen=True)
class NodesReport:
    """The hosts, pairs and folders of a job. `folders`: by path, the ranks that do not see rank 0's files."""

    transport: TransportName
    ranks: tuple[NodeRank, ...]
    pairs: tuple[NodePair, ...]
    folders: dict[str, tuple[str, ...]]

    def levels(self, joins: int) -> tuple[Level, ...]:
        """Return the links, innermost first, as medians of the pairs. `joins`: devices of a node."""
        groups = [[pair for pair in self.pairs if pair.within == within] for within in (True, False)]
        return tuple(
            Level(
                joins=joins if pairs[0].within else None,
                latency_seconds=float(f"{median(pair.latency for pair in pairs):.4g}"),
                bandwidth_bytes_per_second=float(f"{median(pair.bandwidth for pair in pairs):.4g}"),
            )
            for pairs in groups
            if pairs
        )


def examine_nodes(folders: Sequence[Path], cluster: Path | None, out: Path) -> NodesReport | None:
    """Measure the nodes of this process's job. Return the report on rank 0, None on other ranks.

    Args:
        folders: Folders that all ranks should see; by default this one and the cache.
        cluster: A cluster file of one node, or None.
        out: The cluster file to write, with the measured links.

    Raises:
        ConfigError: This process is no rank.
        LaunchError: The ranks cannot connect.
    """
    if not joined():
        rule = "measures the nodes of a job, and this process is no rank of any"
        raise ConfigError.of("--nodes", "true", rule, "torchrun|srun|mpirun ... meshwright doctor --nodes")
    environment = read_environment()
    base = None if cluster is None else load_cluster(str(cluster))
    looked_at = [str(folder.absolute()) for folder in folders or (Path.cwd(), cache_folder())]
    transport: TransportName = "mpi" if starts_mpi() else "torch"
    ranks = Ranks((("data", environment.world_size),), transport=transport)
    (tree,) = run("meshwright.planner.nodes:measure_nodes", ranks, folders=looked_at)
    if environment.rank != 0:
        return None
    report = NodesReport(
        transport,
        tuple(NodeRank(**row) for row in tree["ranks"]),
        tuple(NodePair(**{**row, "ranks": tuple(row["ranks"]), "hosts": tuple(row["hosts"])}) for row in tree["pairs"]),
        {path: tuple(blind) for path, blind in tree["folders"].items()},
    )
    if base is not None:
        with writer_of(out) as write:
            write(with_links(base, report))
    return report


def with_links(base: Cluster, report: NodesReport) -> Cluster:
    """Return the cluster of `base`'s nodes with the measured links between nodes. Measurements within a node by
    `calibrate` are kept.

    Raises:
        ConfigError: All ranks are on one host.
    """
    base_links = base.links.get(report.transport, base.links["torch"])
    between = [level for level in report.levels(base.devices_per_node) if level.joins is None]
    if not between:
        host = report.ranks[0].host
        raise ConfigError.of("--cluster", base.name, f"gets no links between nodes: all ranks are on {host}", "2 hosts")
    inner = base_links.levels[0].model_copy(update={"joins": base.devices_per_node})
    measured = tuple(row for row in base_links.measured if row.ranks <= base.devices_per_node)
    links = base_links.model_copy(update={"levels": (inner, *between), "measured": measured})
    hosts = sorted({rank.host for rank in report.ranks})
    source = f"{base.source}; links between {', '.join(hosts)}: meshwright doctor --nodes"
    return base.model_copy(update={"links": {**base.links, report.transport: links}, "source": source})


def measure_nodes(rank: Rank, folders: Sequence[str]) -> dict[str, Any]:
    """Run one rank's part: host and clock, the pairs in the order of all ranks, and the folders that the rank sees."""
    mesh = rank.mesh
    address = mesh.transport.peers.address if isinstance(mesh.transport, TorchTransport) else ""
    mesh.world.barrier()  # all ranks leave the barrier at about one moment, so clocks can be compared
    local_rank = NodeRank(mesh.rank, socket.gethostname(), chosen_interface(), address, time.time())
    ranks = [NodeRank(**json.loads(text)) for text in all_texts(json.dumps(asdict(local_rank)), mesh.world)]
    hosts = [node_rank.host for node_rank in ranks]
    first = ranks[0].clock_seconds
    places: dict[str, list[int]] = {}
    for position, host in enumerate(hosts):
        places.setdefault(host, []).append(position)
    # The first two ranks of each host, then the first ranks of each two hosts: one pair at a time, in one order.
    measured = [(here[0], here[1]) for here in places.values() if len(here) > 1]
    measured += combinations([here[0] for here in places.values()], 2)
    pairs = [_measured(mesh, pair, hosts) for pair in measured]
    told = [json.loads(text) for text in all_texts(json.dumps(pairs), mesh.world)]
    return {
        "ranks": [
            asdict(node_rank) | {"clock_seconds": round(node_rank.clock_seconds - first, 3)} for node_rank in ranks
        ],
        "pairs": [told[pair["ranks"][0]][index] for index, pair in enumerate(pairs)],
        "folders": {folder: ranks_without(mesh, Path(folder)) for folder in folders},
    }


def _measured(mesh: Mesh, pair: tuple[int, int], hosts: Sequence[str]) -> dict[str, Any]:
    """Measure a pair on its two ranks; other ranks wait and return zeros."""
    latency = bandwidth = 0.0
    if mesh.rank in pair:
        peer = pair[1 - pair.index(mesh.rank)]
        latency = _exchange_seconds(mesh.world, peer, _SMALL_BYTES, _WARM_UPS, _ROUNDS)
        # Both ranks use the smaller rate of the two.
        once = torch.tensor([_exchange_seconds(mesh.world, peer, _FIRST_BYTES, 1, 1)], dtype=torch.float64)
        theirs = torch.empty_like(once)
        mesh.world.exchange(once, peer, theirs, peer)
        rate = _FIRST_BYTES / max(once.item(), theirs.item())
        size = min(_MOST_BYTES, max(_FIRST_BYTES, int(rate * _PAIR_SECONDS / (_ROUNDS + 1))))
        seconds = _exchange_seconds(mesh.world, peer, size, 1, _ROUNDS)
        # The latency is subtracted, at most nine tenths: small messages on a fast link take little longer than the
        # latency.
        bandwidth = size / max(seconds - latency, seconds / 10)
    mesh.world.barrier()
    return asdict(NodePair(pair, (hosts[pair[0]], hosts[pair[1]]), latency, bandwidth))


def _exchange_seconds(world: Comm, peer: int, num_bytes: int, warm_ups: int, rounds: int) -> float:
    """Return the median seconds of an exchange with the other rank."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(warm_ups + rounds):
        start = time.perf_counter()
        world.exchange(sent, peer, received, peer)
        times.append(time.perf_counter() - start)
    return median(times[warm_ups:])


def as_dict(report: NodesReport) -> dict[str, Any]:
    """Return the report as plain values for `--json`."""
    return asdict(report)


def render(report: NodesReport) -> None:
    """Print the hosts, the pairs, the folders."""
    console = table_console()
    hosts = Table("host", "ranks", "interface", "address", "clock, s")
    for host in dict.fromkeys(rank.host for rank in report.ranks):
        host_ranks = [rank for rank in report.ranks if rank.host == host]
        numbers = ", ".join(str(rank.rank) for rank in host_ranks)
        address, clock = host_ranks[0].address or "its name's", f"{host_ranks[0].clock_seconds:+.2f}"
        hosts.add_row(host, numbers, host_ranks[0].interface or "its name's", address, clock)
    pairs = Table("pair", "latency, us", "bandwidth, MB/s", title=f"over {report.transport}, one pair at a time")
    for pair in report.pairs:
        name = f"within {pair.hosts[0]}" if pair.within else " - ".join(pair.hosts)
        pairs.add_row(name, f"{pair.latency * 1e6:,.0f}", f"{pair.bandwidth / 1e6:,.1f}")
    for table in (hosts, pairs):
        print_table(console, table)
    for folder, blind in report.folders.items():
        console.print(f"{folder}: " + (f"not shared: {', '.join(blind)} does not see it" if blind else "shared by all"))
