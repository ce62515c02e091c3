"""The memory of a rank that makes the first weights: python -m benchmarks.first_weights [--ranks N]

A GPT-2 of 80 M parameters in float32, without the optimizer's states. `peak`: the largest growth of a rank's resident
memory until the model is built, of the rank with the most; `kept`: the growth after the build. In addition: the bytes
that strategies keep between steps, and the bytes of the whole model.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

from meshwright.compute.parameters.shard import num_parameters
from meshwright.config import Config, parse_config
from meshwright.ranks.launch import Rank, run
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.parts import build

SYNCS = ("allreduce", "zero1", "zero2", "zero3")
MIB = 2**20


def config_of(sync: str, ranks: int) -> Config:
    model = {"layers": 24, "hidden": 512, "heads": 8, "positions": 128, "vocabulary": 8192, "dropout": 0.0}
    layout = {"data": {"size": ranks, "sync": sync}, "transport": "torch"}
    tree = {"model": model, "data": {"sequence": 128}, "batch": {"global": ranks}, "layout": layout, "device": "cpu"}
    return resolve(parse_config(tree), this_machine()).config


def footprint(rank: Rank, sync: str) -> list[int]:
    """Return bytes: the peak, the growth after the build, weights and gradients between steps, the whole model."""
    mesh = rank.mesh
    mesh.world.barrier()
    before = resident_bytes()
    parts = build(config_of(sync, mesh.world.size), mesh)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    strategy, slots = parts.strategy, parts.strategy.slots
    weights = sum(slot.parameter.nbytes for slot in slots) if sync == "zero3" else strategy.most_bytes[0]
    sliced = sync in ("zero2", "zero3")
    gradients = sum(slot.parameter.nbytes for slot in slots) if sliced else strategy.most_bytes[1]
    whole = 4 * num_parameters(list(parts.specs.values()))
    return [peak - before, resident_bytes() - before, weights + gradients, whole]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    print(f"MiB a rank, {ranks} ranks: peak, kept, weights and gradients between steps, the whole model's weights")
    for sync in SYNCS:
        most = map(max, zip(*run(footprint, config_of(sync, ranks), sync=sync), strict=True))
        print(f"{sync:>10}", *(f"{size / MIB:8.1f}" for size in most))


if __name__ == "__main__":
    main()
