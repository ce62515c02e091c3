"""Time calls, within a budget."""

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
"""The least seconds of a sample: shorter calls are timed several at a time."""

LEAST_SAMPLES = 5
"""However long a call takes: in some of them the heap grows, which costs a call that makes large tensors ten times
what it takes."""

WARM_UPS = 2
"""Calls before timing: libraries choose kernels at the first, and the heap still grows at the second."""

CPU_BATCH_FLOPS = 2**22
"""Flops of the batch in which small products are timed on a CPU."""

Points = list[tuple[float, float]]
"""(size, seconds of a call)."""


@dataclass(frozen=True)
class Effort:
    """Points to measure, with `point_seconds` for each. `sides`: of products; `dtype_side`: of products in the other
    dtypes; `batch_flops`: of the batch in which smaller products are timed, beside which a launch is nothing;
    `lengths`, `attended` (samples, heads), `widths`: of the attention's sequences; `stream_bytes`: that a kernel
    touches; `special_elements`: of a kernel of exponentials; `copy_bytes`: to the host and to the disk; `payloads`:
    bytes sent; `overlap_bytes`: of the sum beside which products run; `cold_bytes`: more than caches hold."""

    point_seconds: float
    sides: Sequence[int]
    dtype_side: int
    lengths: Sequence[int]
    stream_bytes: Sequence[int]
    copy_bytes: int
    payloads: Sequence[int]
    overlap_bytes: int
    cold_bytes: int = 2**26
    batch_flops: int = CPU_BATCH_FLOPS
    attended: Sequence[int] = (8, 8)
    widths: Sequence[int] = (32, 64)
    special_elements: int = 2**18


def effort_of(kind: str, *, quick: bool) -> Effort:
    """The effort for a `kind` of device, cpu or cuda."""
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
    if kind == "cpu":
        return effort
    # A GPU's host issues a kernel in some 10 us: what is timed is as large as many of them, and as its caches, of 50
    # MB and more. By kernels of a CPU's sizes an H200 had twice its peak in float64, and an attention of 0.7 %.
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
    """Times calls of this rank alone, which compute and do not wait. `meet`: returns when all ranks are there, and ends
    them if they are to stop.

    On a CPU it counts the rank's own processor time, not what another process takes of its core: by wall time, float32
    products lost half their rate on a busy machine.
    """

    device: torch.device
    point_seconds: float
    meet: Callable[[], None]
    cold_bytes: int

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of an undisturbed call, while the other ranks do the same. The first calls are not counted."""
        self.meet()
        for _ in range(WARM_UPS):
            call()
        # A clock's own call, and its steps, must not show in a sample.
        repeats = math.ceil(SAMPLE_SECONDS / self._sample(call, 1))
        samples: list[float] = []
        end = time.perf_counter() + self.point_seconds
        while len(samples) < LEAST_SAMPLES or time.perf_counter() < end:
            samples.append(self._sample(call, repeats))
        return lower_quartile(samples)

    def cold_seconds(self, operand_bytes: int, make: Callable[[], Callable[[], object]]) -> float:
        """Seconds of a call that finds its operands in memory, since as many calls as fill the caches take turns.
        `make`: a call with operands of its own, of `operand_bytes`."""
        calls = cycle([make() for _ in range(max(1, math.ceil(self.cold_bytes / operand_bytes)))])

        def call() -> None:
            next(calls)()

        return self.seconds(call)

    def _sample(self, call: Callable[[], object], repeats: int) -> float:
        # A GPU works beside its host, whose processor time says nothing of the device.
        clock = time.perf_counter if self.device.type == "cuda" else time.thread_time
        wait_for_device(self.device)
        start = clock()
        for _ in range(repeats):
            call()
        wait_for_device(self.device)
        return (clock() - start) / repeats


def lower_quartile(samples: Sequence[float]) -> float:
    """The lower quartile: other work on the machine only adds time, to some samples more than to others."""
    return sorted(samples)[len(samples) // 4]


def wait_for_device(device: torch.device) -> None:
    """Return when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meeting(comm: Comm, device: torch.device, stop: StopRequest) -> Callable[[], None]:
    """A function in which all ranks wait for each other; where any of them was asked to stop, all leave the job."""

    def meet() -> None:
        # A rank that left alone would leave others waiting in a collective.
        asked = torch.tensor([float(stop.requested)], device=device)
        comm.all_reduce(asked)
        if asked.item():
            sys.exit()

    return meet
