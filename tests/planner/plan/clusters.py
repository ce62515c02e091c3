"""Clusters made up for tests, with round numbers for sums by hand."""

from __future__ import annotations

from typing import Any

from meshwright.planner.plan.cluster import Cluster, Device, Level, Links

INNER: dict[str, Any] = {"latency": 1e-6, "bandwidth": 1e11}
OUTER: dict[str, Any] = {"latency": 1e-5, "bandwidth": 1e10}


def cluster(*levels: dict[str, Any], measured: list[Any] | None = None, **fields: Any) -> Cluster:
    """Return a cluster with these levels (and measured points) for torch, of a device with round numbers."""
    device = {
        "kind": "cuda",
        "memory": "16G",
        "peak": {"float32": 1e13, "fp16": 1e14},
        "efficiency": [[100, 0.1], [1000, 0.5]],
        "attention": 0.25,
        "bandwidth": [[1e6, 1e11], [1e8, 1e12]],
        "launch": 1e-5,
        "elements": {"special": 1e-9},
        "host_link": 1e10,
    }
    links = {"levels": levels, "measured": measured or []}
    tree = {"name": "made-up", "device": device, "devices_per_node": 4, "links": {"torch": links}} | fields
    return Cluster.model_validate(tree)


FLAT = cluster(INNER)
"""All ranks are on one switch."""
NODES = cluster({**INNER, "joins": 4}, OUTER)
"""Nodes of four."""


def with_room(memory_bytes: int) -> Cluster:
    """Return NODES with other devices."""
    return NODES.model_copy(update={"device": NODES.device.model_copy(update={"memory_bytes": memory_bytes})})


DEVICE = Device(
    kind="cpu",
    memory=2**34,
    peak={"float32": 1e11, "bf16": 1e11},
    efficiency=((64, 0.5), (1024, 0.9)),
    attention=0.3,
    bandwidth=((1e3, 1e10),),
    host_link=1e10,
)


CLUSTER = Cluster(
    name="here", device=DEVICE, devices_per_node=4, links={"torch": Links(levels=(Level(latency=1e-4, bandwidth=1e9),))}
)
