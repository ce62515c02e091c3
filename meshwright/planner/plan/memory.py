"""A rank's memory in a step: its parameters, and its bytes by part.

| part          | bytes                                                                                             |
|---------------|---------------------------------------------------------------------------------------------------|
| weights       | the buckets' values, with padding                                                                 |
| gradients     | equally long, or slices; float32 if half-precision gradients of several microbatches are added    |
| states        | float32 masters of half-precision weights, and moments; with offload the two half-buckets instead |
| activations   | the most that microbatches in flight keep                                                         |
| temporaries   | of tasks at the fullest moment, with gathered buckets if only slices are kept; or the optimizer's |
|               | float32 gradients                                                                                 |
| context       | a process before its first tensor, from the cluster file, and libraries' workspaces               |
| cached        | the allocator's beyond tensors: segments in pieces, memory that was freed (process.py)            |
| communicators | buffers of NCCL                                                                                   |
| host          | offloaded activations and states, and a GPU's checkpoint while being written: in no total         |
| read          | other ranks' gradients in memory that ranks share: resident in each, there once, so in no total   |
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from meshwright.compute.parameters.bucket import gradient_dtype
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.config import Config
from meshwright.planner.plan.cluster import Cluster

Fullness = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Parameter:
    """A parameter as a rank holds it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the rank's shard."""
    dtype: torch.dtype
    spec: ShardSpec
    comes_with_b: bool = False
    """Whether the gradient is computed by B, if weight gradients are tasks (W)."""
    read_back: bool = True
    """Whether autograd keeps the parameter for the backward pass."""
    parts: tuple[int, ...] = ()
    """Parts of the chain that use the parameter, once stages are composed."""
    parts_back: tuple[int, ...] = ()
    """Parts of the chain that read it in the backward pass."""
    chunks: tuple[int, ...] = ()
    """Chunks of the stage that use it."""

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
    """The most bytes of a stage's tasks: kept for microbatches in flight, allocated on the device at any time, and kept
    in host memory."""

    activation_bytes: int
    total_bytes: int
    host_bytes: int = 0


CONTEXT = "the process itself (context)"
"""The name of a process's memory without tensors: on a GPU the CUDA context. Not a sequence's context."""


def bytes_text(size: float) -> str:
    """`12.35 GB`, `431 MB`, `1.35 MB`."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


SURE_BYTES = 0.95
"""Factor that makes estimated activations a lower bound of predicted ones."""


class HeldStage(NamedTuple):
    """Estimated activations of a stage, in bytes."""

    kept_bytes: float
    """Bytes of all microbatches in flight, after a forward pass."""
    peak_bytes: float
    """Bytes at the fullest moment."""
    share: float
    """The stage's parameters, as a share of the parameters of the stage with most."""


def least_total(alone: float, stages: Iterable[HeldStage]) -> float:
    """Return a lower bound of the fullest rank's bytes. `alone`: of the stage with most parameters, without
    activations."""
    return max(stage.share * alone + SURE_BYTES * stage.peak_bytes for stage in stages)


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
    """The share that a process was measured to hold beyond a prediction; None: the device's own."""

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
        """Bytes by counter, each including the one before: torch's max_memory_allocated and max_memory_reserved, and
        the process on its device (nvidia-smi)."""
        return {"allocated": self.allocated, "reserved": self.reserved, "process": self.total}

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part; the sum is `total`."""
        return {
            category: size
            for category, size in asdict(self).items()
            if category not in ("host", "host_of_node", "read", "unpredicted")
        }

    @property
    def text(self) -> str:
        """`weights 1.20 GB, gradients 1.20 GB, ...`: the parts above zero."""
        sizes = {CONTEXT if category == "context" else category: size for category, size in self.parts.items()}
        sizes |= {"in host memory": self.host}
        return ", ".join(f"{category} {bytes_text(size)}" for category, size in sizes.items() if size)


@dataclass(frozen=True)
class Footprint:
    """A rank's peak bytes: of tensors, and held by the allocator for tensors."""

    allocated: int
    reserved: int


def fits(memory: Memory, cluster: Cluster) -> bool:
    """Return whether a rank's memory fits its device, and the memory of a node's ranks fits the node's host memory."""
    return memory.total <= cluster.device.memory_bytes and not lacks_host(memory, cluster)


def lacks_host(memory: Memory, cluster: Cluster) -> bool:
    """Return whether the ranks of a node need more host memory than the cluster file gives."""
    return cluster.host_memory_bytes is not None and memory.host_of_node > cluster.host_memory_bytes


def missing(memory: Memory, cluster: Cluster) -> str:
    """Return `1.20 GB are missing`, of the device's memory or of a node's host memory."""
    if memory.total <= cluster.device.memory_bytes and cluster.host_memory_bytes is not None:
        lacking = bytes_text(memory.host_of_node - cluster.host_memory_bytes)
        return f"{lacking} of the {bytes_text(cluster.host_memory_bytes)} of a node's host memory are missing"
    return f"{bytes_text(memory.total - cluster.device.memory_bytes)} are missing"


def verdict(memory: Memory, cluster: Cluster) -> Fullness:
    """Return whether a rank's memory fits. `tight`: it would not fit if the process held the measured share beyond the
    prediction (Device.unpredicted_share, or a program's rows by strategy: KnownMemory)."""
    device = cluster.device
    if not fits(memory, cluster):
        return "does not fit"
    share = device.unpredicted_share if memory.unpredicted is None else memory.unpredicted
    return "tight" if memory.total * (1 + share) > device.memory_bytes else "fits"
