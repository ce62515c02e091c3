"""Seconds of the start of a large model on this processor, stage by stage, and the memory in use.

    python -m benchmarks.start_large [--model llama-3.2-1b] [--threads 1 2] [--rounds N]

Weights are bf16 (O2), of one rank. Each figure is the least of its rounds, since other processes only add time: wall
seconds, and the processor's seconds of all threads together, which a shared machine changes less.

| row                   | of a rank that has a GPU                                                                   |
|-----------------------|--------------------------------------------------------------------------------------------|
| without values        | the config resolved, and all parts built on the meta device                                |
| initial values        | drawn on the host by this number of threads, rounded to bf16 and copied                    |
| pages                 | host memory for 4 bytes a weight (moments in bf16), made as for a GPU: huge pages          |
| pinned                | the same memory locked, by one call a piece: in place of CUDA's registration               |
| pages of 4 KiB        | the same memory without huge pages                                                         |

`--model` is built for real: `llama-3.2-1b` takes 11 GB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from meshwright.config import Config, parse_config
from meshwright.ranks.mesh import solo_mesh
from meshwright.strategies.data_parallel import assembly
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.parts import build

PIECE_BYTES = 2**28


class Seconds(NamedTuple):
    """Seconds of a stage."""

    wall: float
    processor: float


def config_of(base: str) -> Config:
    """A run of one microbatch, so that gradients are bf16."""
    tree: dict[str, Any] = {
        "model": {"base": base}, "data": {"sequence": 64, "tokenizer": "bytes"}, "batch": {"global": 1, "micro": 1},
        "precision": {"level": "O2", "dtype": "bf16"}, "optimizer": {"states": "bf16", "masters": "bf16"},
        "compile": "none", "device": "cpu",
    }  # fmt: skip
    return resolve(parse_config(tree), this_machine()).config


def seconds_of(act: Callable[[], object]) -> Seconds:
    wall, processor = time.perf_counter(), time.process_time()
    act()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def initial_values(config: Config) -> tuple[Seconds, int]:
    """Return the seconds until all initial values of a rank are drawn and stored, and the number of values."""
    each: list[Seconds] = []
    draw = assembly.draw_values

    def timed(*arguments: Any) -> None:
        each.append(seconds_of(lambda: draw(*arguments)))

    with patch.object(assembly, "draw_values", timed):
        parts = build(config, solo_mesh(torch.device("cpu"), config.grid.names))
    return Seconds(*map(sum, zip(*each, strict=True))), sum(x.numel() for x in parts.model.parameters())


def without_values(base: str) -> None:
    """Resolve a config, and build all parts of a rank on the meta device."""
    config = config_of(base)
    build(config, solo_mesh(torch.device("meta"), config.grid.names))


def host_memory(size: int, huge: bool) -> tuple[Seconds, Seconds]:
    """Return the seconds until torch's threads have made the pages of host memory, and of locking the pages."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.float32)
    made = seconds_of(values[:: mmap.PAGESIZE // 4].zero_)
    lock = ctypes.CDLL(None, use_errno=True).mlock
    lock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def pin() -> None:
        for start in range(0, size, PIECE_BYTES):
            if lock(values.data_ptr() + start, min(PIECE_BYTES, size - start)):
                raise OSError(ctypes.get_errno(), "mlock needs the right to lock memory (ulimit -l)")

    return made, seconds_of(pin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    seconds: dict[str, list[Seconds]] = defaultdict(list)
    rounds, count = range(options.rounds), 0
    seconds["without values"] = [seconds_of(partial(without_values, options.model)) for _ in rounds]
    for threads in options.threads:
        torch.set_num_threads(threads)
        for _ in rounds:
            drawn, count = initial_values(config_of(options.model))
            seconds[f"initial values, {threads} threads"].append(drawn)
            gc.collect()
        # Rounds of one kind follow each other: a virtual machine may have to ask its host for the memory of the first.
        for name, huge in (("pages", True), ("pages of 4 KiB", False)):
            for _ in rounds:
                made, locked = host_memory(4 * count, huge)
                seconds[f"{name}, {threads} threads"].append(made)
                seconds[f"{name}, pinned"].append(locked)
    print(f"{options.model}, {count:,} parameters; least of {options.rounds} rounds")
    for name, each in seconds.items():
        wall, processor = map(min, zip(*each, strict=True))
        print(f"{name:30s} {wall:7.2f} s; processor {processor:7.2f} s, {processor / count * 1e9:6.2f} ns a parameter")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"resident at most: {most / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
