"""Memory and seconds of an adopted step on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.adopt.adopted import Adopted
from meshwright.planner.adopt.lanes import GroupNetwork, StepTime, step_times
from meshwright.planner.adopt.recorder import Collective
from meshwright.planner.plan.cluster import AttentionKernel, Cluster
from meshwright.planner.plan.process import DIRECT, group_bytes
from meshwright.planner.plan.timing import Timer
from meshwright.ranks.fake_world import RECEIVE
from meshwright.ranks.ledger import MESSAGE


@dataclass(frozen=True)
class Planned:
    """A step on a cluster, by rank."""

    steps: dict[int, StepTime]
    seconds: float
    """Seconds of the slowest rank's step."""
    samples: int
    """Rows of the model's first argument in all microbatches of a rank's step."""
    flops: float
    """Floating-point operations of products, of all recorded ranks."""
    utilisation: float
    """Share of the peak in bfloat16, of the recorded ranks; 0 if the device has none."""
    memory: dict[int, dict[str, int]]
    """By rank: parts, cached, context, communicators, and their total."""
    device_bytes: int
    assumed: tuple[str, ...]
    """Assumptions of every number here."""

    @property
    def fits(self) -> bool:
        return all(sizes["total"] <= self.device_bytes for sizes in self.memory.values())

    @property
    def rank(self) -> tuple[int, float]:
        """The order of plans: fitting ones first, then by seconds of a sample."""
        return (0 if self.fits else 1), self.seconds / max(1, self.samples)


def plan(
    ranks: Mapping[int, Adopted], cluster: Cluster, world: int, attention: AttentionKernel | None = None
) -> Planned:
    """Plan recorded ranks on a cluster.

    Args:
        ranks: Facts by rank.
        cluster: The devices and their links.
        world: The number of devices.
        attention: The generation of the fused attention; None: the cluster's own.
    """
    first = ranks[0]
    timer = Timer(cluster, min(world, cluster.devices_per_node), tf32=first.tf32, attention=attention)
    names = dict(enumerate(first.paths))
    steps = step_times(
        {r: adopted.entries for r, adopted in ranks.items()}, names, timer, GroupNetwork(cluster, world), cluster
    )
    seconds = max(step.seconds for step in steps.values())
    flops = sum(adopted.flops for adopted in ranks.values())
    peak = cluster.device.peak_of("bf16", tf32=False)
    rows = first.inputs[0][1][0] if first.inputs and first.inputs[0][1] else 1
    return Planned(
        steps, seconds, rows * first.microbatches, flops,
        0.0 if peak is None else flops / len(ranks) / seconds / peak,
        {rank: memory_of(adopted, cluster) for rank, adopted in ranks.items()}, cluster.device.memory_bytes,
        tuple(assumptions(ranks, cluster, world)),
    )  # fmt: skip


def memory_of(adopted: Adopted, cluster: Cluster) -> dict[str, int]:
    """Return a rank's memory on the device by part, with the process's own and the buffers of communicators."""
    parts = {name: size for name, size in adopted.memory.parts.items() if size}
    device = cluster.device
    parts["cached"] = adopted.memory.reserved - adopted.memory.allocated
    parts["context"] = device.reserved_bytes + device.workspaces_bytes
    parts["communicators"] = communicator_bytes(adopted, cluster)
    return {**parts, "total": sum(parts.values())}


def communicator_bytes(adopted: Adopted, cluster: Cluster) -> int:
    """Return the bytes of a rank's NCCL communicators, of the groups in use (process.py has the figures)."""
    groups: dict[tuple[int, ...], set[str]] = {}
    for entry in adopted.entries:
        if isinstance(entry.event, Collective):
            groups.setdefault(entry.event.sending.ranks, set()).add(entry.event.sending.verb)
    total, channels = 0, cluster.links["torch"].channels
    for ranks, verbs in groups.items():
        on_a_node = max(Counter(rank // cluster.devices_per_node for rank in ranks).values())
        direct = bool(verbs & {*DIRECT, MESSAGE, RECEIVE})
        total += group_bytes(len(ranks), on_a_node - 1, channels, direct=direct)
    return total


def assumptions(ranks: Mapping[int, Adopted], cluster: Cluster, world: int) -> list[str]:
    """Return what no number of a plan includes, or assumes."""
    lines = []
    sent = any(isinstance(e.event, Collective) for adopted in ranks.values() for e in adopted.entries)
    if world > 1 and not sent:
        lines.append(f"the script sends nothing: {world} devices would run {world} equal copies")
    if world > len(ranks):
        lines.append(f"recorded: ranks {', '.join(map(str, ranks))} of {world}; the others are taken to be equal")
    if cluster.checked is None:
        lines.append(f"no prediction on {cluster.name} has been compared with a measurement")
    else:
        error = f"{100 * cluster.checked.error:.0f} % mean error of {cluster.checked.rows} rows"
        lines.append(f"seconds of our own layouts on {cluster.name} have a {error}; scripts add the notes below")
    if ranks[0].device == "cpu":
        lines.append("the model stays in host memory: kernels are a CPU's, timed as this device's")
    lines.append("the loader's seconds, checkpoints and evaluation are not part of the step")
    return lines
