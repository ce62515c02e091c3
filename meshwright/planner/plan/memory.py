"""A rank's memory in a step: its parameters, and its bytes by part.

| part          | bytes                                                                                             |
|---------------|---------------------------------------------------------------------------------------------------|
| weights       | the buckets' values, with their padding                                                           |
| gradients     | as much, or slices; in float32 where several microbatches of half-precision ones are added up     |
| states        | float32 masters of half-precision weights, and moments; with offload the two half-buckets instead |
| activations   | the most that microbatches in flight keep                                                         |
| temporaries   | needed by tasks beside that at the fullest moment, buckets among it of which only slices are      |
|               | kept; or the optimizer's float32 gradients                                                        |
| context       | what the cluster says that a process holds before its first tensor, and libraries' workspaces     |
| cached        | the allocator's beyond tensors: segments in pieces, memory that was freed (process.py)            |
| communicators | buffers of NCCL                                                                                   |
| host          | activations and states moved there, and a GPU's checkpoint while it is written: in no total       |
| read          | other ranks' gradients in memory that ranks share: resident in each, there once, so in no total   |
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import torch

from meshwright.compute.parameters.bucket import gradient_dtype
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.config import Config
from meshwright.planner.plan.cluster import Cluster

Fullness = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Parameter:
    """A parameter as a rank holds it. `shape`: of the rank's part. `comes_with_b`: its gradient does not wait for W,
    where weight gradients are tasks of their own. `read_back`: autograd keeps it for its part's backward pass. `parts`:
    those of the chain that use it, `parts_back` those that read it going backward, and `chunks` those of its stage that
    use it, once they are composed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: ShardSpec
    comes_with_b: bool = False
    read_back: bool = True
    parts: tuple[int, ...] = ()
    parts_back: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def weight_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def gradient_bytes(self, config: Config) -> int:
        if not self.spec.role.rule.trained:
            return 0
        return self.num_elements * gradient_dtype(self.dtype, config.widens_gradients).itemsize


@dataclass(frozen=True)
class Peak:
    """The most that a stage's tasks keep for microbatches in flight on the device, the most that is alive there at any
    time, and the most that is kept in host memory."""

    activation_bytes: int
    total_bytes: int
    host_bytes: int = 0


CONTEXT = "the process itself (context)"
"""In words, what a process holds without any tensor, on a GPU the CUDA context: no sequences."""


def bytes_text(size: float) -> str:
    """`12.35 GB`, `431 MB`, `1.35 MB`."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by part."""

    weights: int
    gradients: int
    states: int
    activations: int
    temporaries: int
    context: int
    cached: int = 0
    communicators: int = 0
    host: int = 0
    host_of_node: int = 0
    """Bytes in host memory of all ranks of a node."""
    read: int = 0
    unpredicted: float | None = None
    """The share that a process was measured to hold beyond such a prediction; None: the device's own."""

    @property
    def total(self) -> int:
        return self.reserved + self.context + self.communicators

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds."""
        return self.allocated + self.cached

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the fullest moment."""
        return self.weights + self.gradients + self.states + self.activations + self.temporaries

    @property
    def held(self) -> dict[str, int]:
        """Bytes by who counts them: torch's max_memory_allocated and max_memory_reserved, and the process on its device
        (nvidia-smi's), each with the one before."""
        return {"allocated": self.allocated, "reserved": self.reserved, "process": self.total}

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part; together they are `total`."""
        return {
            part: size
            for part, size in asdict(self).items()
            if part not in ("host", "host_of_node", "read", "unpredicted")
        }

    @property
    def text(self) -> str:
        """`weights 1.20 GB, gradients 1.20 GB, ...`: the parts that there are."""
        sizes = {CONTEXT if part == "context" else part: size for part, size in self.parts.items()}
        sizes |= {"in host memory": self.host}
        return ", ".join(f"{part} {bytes_text(size)}" for part, size in sizes.items() if size)


@dataclass(frozen=True)
class Footprint:
    """The most bytes of tensors that a rank has at a time, and the most that its allocator holds for them."""

    allocated: int
    reserved: int


def fits(memory: Memory, cluster: Cluster) -> bool:
    """Whether a rank's memory fits into its device, and that of a node's ranks into the node's host memory."""
    return memory.total <= cluster.device.memory_bytes and not lacks_host(memory, cluster)


def lacks_host(memory: Memory, cluster: Cluster) -> bool:
    """Whether the ranks of a node need more host memory than the cluster says that a node has."""
    return cluster.host_memory_bytes is not None and memory.host_of_node > cluster.host_memory_bytes


def missing(memory: Memory, cluster: Cluster) -> str:
    """`1.20 GB are missing`: of the device's memory, or of a node's host memory."""
    if memory.total <= cluster.device.memory_bytes and cluster.host_memory_bytes is not None:
        lacking = bytes_text(memory.host_of_node - cluster.host_memory_bytes)
        return f"{lacking} of the {bytes_text(cluster.host_memory_bytes)} of a node's host memory are missing"
    return f"{bytes_text(memory.total - cluster.device.memory_bytes)} are missing"


def verdict(memory: Memory, cluster: Cluster) -> Fullness:
    """Whether a rank's memory fits: `tight` where it would not if processes hold as much more than is predicted as they
    were measured to (Device.unpredicted_share, or of a program's own rows: KnownMemory, by strategy)."""
    device = cluster.device
    if not fits(memory, cluster):
        return "does not fit"
    share = device.unpredicted_share if memory.unpredicted is None else memory.unpredicted
    return "tight" if memory.total * (1 + share) > device.memory_bytes else "fits"
