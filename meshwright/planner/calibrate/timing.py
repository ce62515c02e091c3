"""Timing of calls within a budget."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from meshwright.ranks.comm import Comm
from meshwright.ranks.launch import StopRequest

SAMPLE_SECONDS = 1e-3
"""Minimum seconds of a sample: shorter calls are timed several at a time."""

LEAST_SAMPLES = 5
"""Minimum number of samples, even of slow calls. In some samples the heap grows, which makes a call with large tensors
ten times slower."""

WARM_UPS = 2
"""Calls before timing: libraries choose kernels in the first call, and the heap still grows in the second."""

CPU_BATCH_FLOPS = 2**22
"""Flops of the batch in which small products are timed on a CPU."""

Points = list[tuple[float, float]]
"""(size, seconds of a call)."""


@dataclass(frozen=True)
class Effort:
    """The points to measure."""

    point_seconds: float
    """Time budget of a point."""
    sides: Sequence[int]
    """Sides of products."""
    dtype_side: int
    """Side of products in the other dtypes."""
    lengths: Sequence[int]
    """Sequence lengths of attention."""
    stream_bytes: Sequence[int]
    """Bytes that an element-wise kernel reads and writes."""
    copy_bytes: int
    """Bytes of copies to the host and to the disk."""
    payloads: Sequence[int]
    """Bytes to send."""
    overlap_bytes: int
    """Bytes of the all-reduce that products overlap with."""
    cold_bytes: int = 2**26
    """More bytes than the caches hold."""
    batch_flops: int = CPU_BATCH_FLOPS
    """Flops of a batch of small products, large enough that the launch is negligible."""
    attended: Sequence[int] = (8, 8)
    """Samples and heads of attention."""
    widths: Sequence[int] = (32, 64)
    """Head widths of attention."""
    special_elements: int = 2**18
    """Elements of a kernel of exponentials."""


def effort_of(device_type: str, *, quick: bool) -> Effort:
    """Return the effort for a device of `device_type`, cpu or cuda."""
    if quick:
        effort = Effort(
            point_seconds=0.02,
            sides=(16, 64, 256, 1024),
            dtype_side=256,
            lengths=(128, 256),
            stream_bytes=tuple(2**power for power in range(12, 27, 4)),
            copy_bytes=2**25,
            payloads=tuple(2**power for power in range(10, 23, 4)),
            overlap_bytes=2**22,
        )
    else:
        effort = Effort(
            point_seconds=0.12,
            sides=(16, 32, 64, 128, 256, 512, 1024, 2048),
            dtype_side=256,
            lengths=(128, 256, 512),
            stream_bytes=tuple(2**power for power in range(12, 29, 2)),
            copy_bytes=2**27,
            payloads=tuple(2**power for power in range(10, 25, 2)),
            overlap_bytes=2**22,
        )
    if device_type == "cpu":
        return effort
    # A GPU's host takes some 10 us to issue a kernel, so kernels must be much longer, and larger than caches of 50 MB
    # and more. With a CPU's sizes an H200 was measured at twice the peak in float64, and at 0.7 % in attention.
    return replace(
        effort,
        sides=tuple(side * 8 for side in effort.sides if side < 2048),
        dtype_side=4096,
        batch_flops=2**36,
        lengths=(1024, 4096) if quick else (512, 1024, 4096),
        attended=(32, 16),
        widths=(64, 128),
        stream_bytes=(*effort.stream_bytes, 2**30),
        special_elements=2**26,
        cold_bytes=2**28,
    )


@dataclass(frozen=True)
class CallTimer:
    """Timer of calls that compute on this rank without waiting for others. `meet`: waits for all ranks, and ends all if
    a stop was requested.

    On a CPU the timer counts the rank's own processor time, without the time that other processes take on the core. By
    wall time, float32 products had half the rate on a busy machine.
    """

    device: torch.device
    point_seconds: float
    meet: Callable[[], None]
    cold_bytes: int

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of an undisturbed call, while all other ranks do the same. The first calls are not
        counted."""
        self.meet()
        for _ in range(WARM_UPS):
            call()
        # Long samples make the clock's own cost and resolution negligible.
        repeats = math.ceil(SAMPLE_SECONDS / self._sample(call, 1))
        samples: list[float] = []
        end = time.perf_counter() + self.point_seconds
        while len(samples) < LEAST_SAMPLES or time.perf_counter() < end:
            samples.append(self._sample(call, repeats))
        return lower_quartile(samples)

    def cold_seconds(self, operand_bytes: int, make: Callable[[], Callable[[], object]]) -> float:
        """Return the seconds of a call with operands in memory instead of caches.

        `make` returns a call with its own operands of `operand_bytes`. Enough calls take turns to exceed the caches.
        """
        calls = cycle([make() for _ in range(max(1, math.ceil(self.cold_bytes / operand_bytes)))])

        def call() -> None:
            next(calls)()

        return self.seconds(call)

    def _sample(self, call: Callable[[], object], repeats: int) -> float:
        # A GPU runs asynchronously, so the host's processor time does not measure the device.
        clock = time.perf_counter if self.device.type == "cuda" else time.thread_time
        wait_for_device(self.device)
        start = clock()
        for _ in range(repeats):
            call()
        wait_for_device(self.device)
        return (clock() - start) / repeats


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the lower quartile: other work on the machine only adds time, to some samples more than to others."""
    return sorted(samples)[len(samples) // 4]


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meeting(comm: Comm, device: torch.device, stop: StopRequest) -> Callable[[], None]:
    """Return a function that waits for all ranks; if a stop was requested on any rank, the function exits on all."""

    def meet() -> None:
        # If a single rank exited, the others would wait for it in a collective.
        asked = torch.tensor([float(stop.requested)], device=device)
        comm.all_reduce(asked)
        if asked.item():
            sys.exit()

    return meet
