"""A cluster with a program's software on it: the pace of a run's ranks there, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.compute.models.experts_section import experts_of
from meshwright.config import Config
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.expert_ranks import Choice
from meshwright.planner.plan.network import DISPATCHERS, ClusterNetwork, Rows, are_rows
from meshwright.planner.plan.recorder import Program
from meshwright.planner.plan.remembered import remembered
from meshwright.planner.plan.software import Software
from meshwright.planner.plan.timing import Timer, slowed
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import HEAD_COPIES, PIPE, Grid
from meshwright.ranks.transports import TransportName

MULTIPROCESSORS = {8: 108, 9: 132, 10: 148}
"""Multiprocessors of an A100, an H100 SXM, a B200 or B300 (NVIDIA's architecture papers), by major capability."""


@dataclass(frozen=True)
class Links:
    """Links between ranks that differ on some axes only. Two are equal if transport, number of ranks and strides are
    equal."""

    transport: TransportName
    world_size: int
    strides: tuple[tuple[str, int, int], ...]
    """(axis, size, stride in ranks), outermost first; a split axis has an entry for each part."""
    _find: Callable[[], ClusterNetwork] = field(compare=False, repr=False)

    @cached_property
    def _network(self) -> ClusterNetwork:
        return self._find()

    def collective(self, axes: str, verb: str, payload_bytes: int) -> float:
        """Return the seconds of a collective (ClusterNetwork.collective) over some of the axes."""
        self._check(axes)
        return self._network.collective(axes, verb, payload_bytes)

    def message(self, sender: int, receiver: int, payload_bytes: int) -> float:
        """Return the seconds of a pipeline's message (ClusterNetwork.message)."""
        self._check(PIPE)
        return self._network.message(sender, receiver, payload_bytes)

    def stages(self) -> list[int]:
        """Return rank 0 and the corresponding ranks of the other stages."""
        self._check(PIPE)
        ranks = [0]
        for axis, size, stride in self.strides:
            if axis == PIPE:
                ranks = [rank + index * stride for rank in ranks for index in range(size)]
        return sorted(ranks)

    def along(self, names: Collection[str]) -> Links:
        """Return the links on some of the axes."""
        strides = tuple(each for each in self.strides if each[0] in names)
        return Links(self.transport, self.world_size, strides, self._find)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset((HEAD_COPIES, *(name for name, _, _ in self.strides)))

    def _check(self, axes: str) -> None:
        if axes not in self._names:
            unknown = set(axes.split("+")) - self._names
            assert not unknown, (
                f"{', '.join(sorted(unknown))}: the strides of {', '.join(sorted(self._names))} are known"
            )


@dataclass
class Site:
    """A cluster and a program's software."""

    cluster: Cluster
    software: Software

    @remembered()
    def timer(self, world_size: int, tf32: bool, devices_per_host: int = 1) -> Timer:
        """Make the timer of a rank that shares the hardware: with all ranks on one machine (`cores` is set), else with
        the ranks of a node. `devices_per_host`: number of devices that one host issues kernels for, in turn."""
        # Ranks of different nodes share no cores.
        ranks = world_size if self.cluster.cores is not None else min(world_size, self.cluster.devices_per_node)
        return Timer(
            self.cluster, ranks, tf32=tf32, devices_per_host=devices_per_host,
            attention=self.software.attention_kernel,
        )  # fmt: skip

    @remembered()
    def network(self, transport: TransportName, grid: Grid, rows: Rows | None = None) -> ClusterNetwork:
        """Make the links between a grid's ranks. `rows`: how rows are sent to experts; None: by all-to-alls."""
        return ClusterNetwork(self.cluster, transport, grid, rows)

    def rows(self, config: Config) -> Rows | None:
        """Describe the program's kernels that send each row once to experts; None: all-to-alls send all rows."""
        ranks, experts = self.software.expert_ranks, experts_of(config)
        if ranks is None or experts is None or ranks.dispatcher not in DISPATCHERS:
            return None
        choice = Choice(experts.count, experts.per_token, experts.groups, experts.groups_per_token)
        sms = self.software.dispatch_sms or DISPATCHERS[ranks.dispatcher].sms
        every = self._multiprocessors
        if every is not None and sms >= every:
            rule = f"leaves none of the {every} multiprocessors of {self.cluster.name}'s devices to products"
            raise ConfigError.of("dispatch_sms", sms, rule, f"1 to {every - 1}")
        parts = ranks.tensor or dict(config.layout.tensor.axes).get("tensor", 1)
        return Rows(ranks.dispatcher, choice, parts, sms)

    @cached_property
    def _multiprocessors(self) -> int | None:
        """The number of multiprocessors of a device; None: not in the table, and the links' tax counts instead."""
        return MULTIPROCESSORS.get((self.cluster.device.capability or (0, 0))[0])

    def program_seconds(
        self, program: Program, timer: Timer, links: ClusterNetwork | Links, transport: TransportName, config: Config,
        *, alone: bool = False,
    ) -> float:  # fmt: skip
        """Return the seconds of a part's program, including the communication of the part's layers.

        Args:
            program: The part's recorded kernels and collectives.
            timer: The pace of kernels.
            links: The links between ranks.
            transport: The transport, for its share of overlap and its tax on kernels.
            config: The run.
            alone: True: no other microbatch computes meanwhile, so rows to experts are not hidden.
        """
        facts, overlapped = self.cluster.links[transport], self.software.overlapped
        usual = facts.overlaps if "layers" in overlapped else 0.0, facts.tax
        whole = timer.seconds(program, links.collective, *usual)
        if alone or "experts" not in overlapped or not config.model.routing.num_experts:
            return whole

        def others(axes: str, verb: str, payload_bytes: int) -> float:
            return 0.0 if are_rows(axes, verb) else links.collective(axes, verb, payload_bytes)

        computed = timer.seconds(program, others, *usual)
        hidden = min(whole - computed, facts.overlaps * computed)
        rows, tax = self.rows(config), facts.tax
        if rows is not None and self._multiprocessors is not None:
            tax = rows.sms / (self._multiprocessors - rows.sms)
        return whole - hidden + slowed(hidden * (1 + tax), tax)

    def links(self, config: Config, *more: str) -> Links:
        """Return the links between ranks that share a layer or differ on the axes `more`."""
        names, strides, stride = {*(name for name, _ in config.layout.layer_axes), *more}, [], 1
        for name, size in reversed(config.layout.nesting):
            if name in names:
                strides.append((name, size, stride))
            stride *= size
        transport = transport_on(self.cluster, config)
        return Links(
            transport, stride, tuple(reversed(strides)), lambda: self.network(transport, config.grid, self.rows(config))
        )

    def message_seconds(
        self, config: Config, links: ClusterNetwork | Links, sender: int, receiver: int, size: int
    ) -> float:
        """Return the seconds until rank `receiver` has `size` bytes from `sender` in the neighbouring stage."""
        shared = config.layout.tensor.same_activation
        parts = dict(config.layout.tensor.axes).get(shared, 1) if self.software.messages == "split" else 1
        if parts == 1:
            return links.message(sender, receiver, size)
        # Peers have the same activation: each peer sends a part over a separate link, and all gather the parts.
        gathered = links.collective(shared, "all_gather", size)
        return links.message(sender, receiver, -(-size // parts)) + gathered

    def context(self, config: Config) -> int:
        """Return the bytes that each process of a run holds on the device in addition to tensors."""
        device, links = self.cluster.device, self.cluster.links.get(transport_on(self.cluster, config))
        # MPI's libraries take other amounts than gloo's, so the transport's measured number has priority.
        measured = None if links is None else links.reserved_bytes
        return (device.reserved_bytes if measured is None else measured) + device.workspaces_bytes


def transport_on(cluster: Cluster, config: Config) -> TransportName:
    """Return the run's transport; for `auto`, the transport that a run on this cluster would choose."""
    if config.layout.transport != "auto":
        return config.layout.transport
    # The same rule as the run's own auto: MPI on CPUs with MPI, never for syncs of torch.distributed.
    carried = cluster.device.kind == "cpu" and config.layout.data.strategy.over_mpi
    return "mpi" if carried and "mpi" in cluster.links else "torch"
