"""What a rank holds, by part, in bytes; and what its optimizer touches in a step.

| part        | bytes                                                                                             |
|-------------|---------------------------------------------------------------------------------------------------|
| weights     | the buckets' values, with their padding                                                           |
| gradients   | as much; in float32 where several microbatches of half-precision ones are added up                |
| states      | float32 masters of half-precision weights, and moments; with offload the two half-buckets instead |
| activations | the most that microbatches in flight keep                                                         |
| temporaries | what tasks make beside that at the dearest moment; or the optimizer's float32 gradients            |
| framework   | what the cluster says that libraries hold                                                         |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.config import Config
from meshwright.memory.offload import SINGLE, state_bytes
from meshwright.tools.plan.step import Peak
from meshwright.tools.plan.synchronising import PlannedBucket


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by part."""

    weights: int
    gradients: int
    states: int
    activations: int
    temporaries: int
    framework: int

    @property
    def total(self) -> int:
        return self.fixed + self.activations + self.temporaries

    @property
    def fixed(self) -> int:
        """What a run holds before its first forward pass, once the optimizer has its states."""
        return self.weights + self.gradients + self.states + self.framework


def streams(config: Config) -> bool:
    """Whether an optimizer steps each bucket as it comes: an offloaded one that does not wait for the norm, as clipping
    and fp16's loss scale do."""
    waits = config.optimizer.clip is not None or config.precision.dtype == "fp16"
    return config.memory.offload.to != "none" and not waits


def memory_of(config: Config, buckets: Sequence[PlannedBucket], peak: Peak, framework_bytes: int) -> Memory:
    """Of a rank with these buckets, whose tasks hold so much at most."""
    held = sum(bucket.size_bytes for bucket in buckets)
    gradients = sum(bucket.gradient_bytes for bucket in buckets)
    most = max(peak.total_bytes, _widened_bytes(config, buckets))
    activations = min(peak.activation_bytes, most)
    return Memory(
        held, gradients, state_bytes(config, slots_of(buckets)), activations, most - activations, framework_bytes
    )


def slots_of(buckets: Sequence[PlannedBucket]) -> list[tuple[int, torch.dtype]]:
    """Elements and type of what a rank's optimizer steps."""
    return [(bucket.stepped_elements, bucket.kind.dtype) for bucket in buckets]


def _master_bytes(bucket: PlannedBucket) -> int:
    return SINGLE if bucket.kind.dtype.itemsize < SINGLE else 0


def _widened_bytes(config: Config, buckets: Sequence[PlannedBucket]) -> int:
    """Float32 gradients of half-precision ones, which states in place make of all of them at once."""
    if config.memory.offload.to != "none":
        return 0
    return sum(bucket.stepped_elements * SINGLE for bucket in buckets if bucket.summed_in.itemsize < SINGLE)


def touched_bytes(config: Config, bucket: PlannedBucket) -> int:
    """Read and written by the norm and the optimizer's step of a bucket: weight and moments twice, gradients once in
    each, and where weights are halves the gradient's widening and the rounding."""
    moments = len(config.optimizer.update.states)
    size, gradient = bucket.kind.dtype.itemsize, bucket.summed_in.itemsize
    wide = max(SINGLE, size)
    each = gradient + wide * (2 + 2 * moments + 1)
    if gradient < SINGLE:
        each += gradient + SINGLE
    if _master_bytes(bucket):
        each += SINGLE + size
    return bucket.stepped_elements * each


def moved_bytes(config: Config, bucket: PlannedBucket) -> int:
    """Between the device and where an offloaded optimizer's states are, both ways: master and moments."""
    if config.memory.offload.to == "none":
        return 0
    own = _master_bytes(bucket) + SINGLE * len(config.optimizer.update.states)
    return 2 * bucket.stepped_elements * own
