"""The offloaded optimizer: bytes on the device against 4 · phi + 16 · bucket, resident memory, and overlap's gain.

    python -m benchmarks.offload [--transport torch|mpi] [--link GB_PER_SECOND] [--rounds N] [--steps N] [--json FILE]

Three tables, of a GPT-2 of 23 M parameters in bf16 O2 with buckets of 1 M elements. All measure the phase after a
backward pass: sum the gradients, step, publish; the gradients are constants.
Memory: one process for each place of the states. `device`: parameters, gradients, and the optimizer's other bytes at
the peak. `anonymous`, `file`: the growth of the process's resident memory since before the model was built.
Overlap: 2 ranks, each contender with all others in turns. `no overlap`: all is summed, then all is stepped.
Real sums use the cores that step. The third table therefore has a modelled link: a sum sleeps for the bytes' time.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contender import Contender, Place, Step
from benchmarks.interleave import measure, plan_arguments, plan_of, write_json
from meshwright.compute.parameters.bucket import Bucket
from meshwright.config import Config, parse_config
from meshwright.ranks.comm import Comm, Work
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import open_mesh, solo_mesh
from meshwright.strategies.data_parallel.policies import AllReduce
from meshwright.strategies.memory.offload import Offloaded
from meshwright.training.parts import Parts, build

BUCKET = 2**20
CHUNKS = (1, 2, 4, 8)
NO_OVERLAP = "no overlap"
MEMORY_STEPS = 3


def config_of(to: str, chunk: int, ranks: int = 1) -> Config:
    """Return a config without clipping and loss scaling, so that chunks may be stepped on arrival."""
    return parse_config(
        {
            "model": {"layers": 6, "hidden": 512, "heads": 8, "positions": 128, "vocabulary": 8192, "dropout": 0.0},
            "data": {"sequence": 128},
            "batch": {"global": 2},
            "layout": {"data": {"size": ranks}},
            "precision": {"level": "O2", "dtype": "bf16"},
            "memory": {"offload": {"to": to, "bucket": BUCKET, "chunk": chunk}},
            "optimizer": {"clip": None},
        }
    )


def phase(parts: Parts, count: int, *, overlap: bool) -> None:
    """Finish the step that a backward pass has begun."""
    for bucket in parts.strategy.buckets:
        bucket.gradients.fill_(1e-3)
    arrivals = parts.strategy.arrivals()
    parts.optimizer.step(count, arrivals if overlap else list(arrivals))
    parts.strategy.publish()


@dataclass(frozen=True)
class Asleep:
    """A sum that ends at `deadline`."""

    deadline: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.deadline - time.perf_counter()))


class Paced(AllReduce):
    """A sum of nothing: a bucket occupies a link of `rate` bytes a second for the time of the bucket's bytes."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        self._free = max(time.perf_counter(), self._free) + bucket.gradients.nbytes / self._rate
        return Asleep(self._free)


@contextmanager
def train(place: Place, chunk: int, overlap: bool, transport: str, link: float = 0.0) -> Iterator[Step]:
    """Run a contender's rank, on a modelled link of `link` GB/s if given. The returned loss has no meaning."""
    config = config_of("host", chunk, place.ranks)
    layout, device = config.layout, torch.device("cpu")
    with open_mesh(Grid(layout.axes), read_environment(), transport, device, rendezvous(), layout.token_axes) as mesh:
        parts = build(config, mesh)
        if link:
            paced = Paced(link * 1e9)
            for reduction in parts.strategy.sums:
                reduction.policy = paced
        count = 0

        def step() -> float:
            nonlocal count
            phase(parts, count, overlap=overlap)
            count += 1
            return 0.0

        yield step


@dataclass(frozen=True)
class Footprint:
    """Bytes of one run."""

    to: str
    phi: int
    """The count of parameters."""
    device: int
    bound: int
    """4 · phi + 16 · bucket."""
    anonymous: int
    file: int
    cuda: int
    """The most that torch has allocated on the GPU; 0 without a GPU."""


def footprint(to: str, folder: str) -> Footprint:
    """Run some steps in this process, which must be a fresh process."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = resident()
    parts = build(config_of(to, 4), solo_mesh(device), Path(folder))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for count in range(MEMORY_STEPS):
        phase(parts, count, overlap=True)
    after = resident()
    held = parts.optimizer.held
    buckets = parts.strategy.buckets
    phi = sum(bucket.values.numel() for bucket in buckets)
    flat = sum(bucket.values.nbytes + bucket.gradients.nbytes for bucket in buckets)
    beside = held.staging.num_bytes if isinstance(held, Offloaded) else _in_place_bytes(parts)
    return Footprint(
        to, phi, flat + beside, 4 * phi + 16 * BUCKET, after["RssAnon"] - before["RssAnon"],
        after["RssFile"] - before["RssFile"], torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    )  # fmt: skip


def _in_place_bytes(parts: Parts) -> int:
    """Count masters, the masters' gradients and moments of an optimizer in place."""
    total = 0
    for index, slot in enumerate(parts.strategy.slots):
        states = parts.optimizer.held.tensors(index)
        total += sum(tensor.nbytes for state, tensor in states.items() if state != "weight")
        if states["weight"].dtype != slot.parameter.dtype:
            total += 2 * states["weight"].nbytes
    return total


def resident() -> dict[str, int]:
    """Return the resident memory of this process by kind, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines) if "Rss" in name}


def measure_memory() -> list[Footprint]:
    """Measure each place of the states in a fresh process."""
    found = []
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=".") as folder:
        for to in ("none", "host", "disk"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(footprint, (to, folder)))
    return found


def show_memory(footprints: list[Footprint]) -> None:
    table = Table(title=f"bytes of a step, phi = {footprints[0].phi / 1e6:.1f} M, in MB")
    for head in ("states", "device", "4 phi + 16 bucket", "ratio", "resident: anonymous", "file", "GPU, torch's peak"):
        table.add_column(head, justify="right")
    for found in footprints:
        sizes = (found.device, found.bound, found.anonymous, found.file, found.cuda)
        device, bound, anonymous, file, cuda = (f"{size / 1e6:.1f}" for size in sizes)
        table.add_row(found.to, device, bound, f"{found.device / found.bound:.3f}", anonymous, file, cuda)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def contenders(transport: str, link: float) -> list[Contender]:
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    options = {f"chunk {chunk}": (chunk, True) for chunk in CHUNKS}
    return [
        Contender(
            name,
            "benchmarks.offload:train",
            {"chunk": chunk, "overlap": overlap, "transport": transport, "link": link},
            2,
            launcher,
        )
        for name, (chunk, overlap) in ({NO_OVERLAP: (4, False)} | options).items()
    ]


def main() -> None:
    parser = plan_arguments("The offloaded optimizer's memory, and its overlap with the sum of the gradients.")
    parser.add_argument("--transport", choices=["torch", "mpi"], default="torch")
    parser.add_argument("--link", type=float, default=0.3, metavar="GB_PER_SECOND", help="of the modelled link")
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    footprints = measure_memory()
    show_memory(footprints)
    tables: dict[str, Any] = {"memory": [asdict(found) for found in footprints]}
    for name, link in (
        (f"real sums, {arguments.transport}", 0.0),
        (f"a link of {arguments.link} GB/s", arguments.link),
    ):
        made, title = contenders(arguments.transport, link), f"sum and step, 2 ranks of one thread, {name}"
        tables[name] = measure(title, made, plan, [NO_OVERLAP])
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
