"""Activation checkpointing: the bytes that a forward pass keeps, and the time of a second forward pass.

    python -m benchmarks.recompute [--rounds N] [--steps N] [--json FILE]

A GPT-2 of 12 layers, hidden 256, sequence 256, dropout 0.1, one microbatch of 2 sequences, float32, one thread.
Bytes (memory/recompute.py): `kept` is the memory of all tensors that a forward pass has made and left alive, `peak`
the most alive at any time in the forward and the backward pass; `counted` is `kept` by meta tensors. (Buckets hold the
gradients, and are allocated before.) Times: a whole step, all settings in turns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contender import Contender, Place, Step
from benchmarks.interleave import measure, plan_arguments, plan_of, write_json
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import solo_mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.training.on_device import AsOnDevice
from meshwright.training.parts import Parts, build
from meshwright.training.rank_model import empty_batch
from meshwright.training.step import train_step

SETTINGS: dict[str, Any] = {"none": "none", "selective": "selective", "auto (every 3)": "auto", "every 1": 1}


def config_of(recompute: Any) -> Config:
    return parse_config(
        {
            "model": {
                "layers": 12, "hidden": 256, "heads": 4, "positions": 256, "vocabulary": 2048, "dropout": 0.1,
            },
            "data": {"sequence": 256},
            "batch": {"global": 2},
            "memory": {"recompute": recompute},
        }
    )  # fmt: skip


def passes(parts: Parts) -> Iterator[None]:
    """Run a forward pass, then, at the next call, the backward pass."""
    batch = empty_batch(parts.config, parts.kit, parts.model, parts.mesh.device)
    (loss,) = parts.model(batch, {"labels": 1e-3})
    yield
    loss.backward()


@contextmanager
def train(place: Place, recompute: Any) -> Iterator[Step]:
    """Yield steps of a contender, on a batch of zeros."""
    parts = build(config_of(recompute), solo_mesh(torch.device("cpu")))
    batch = empty_batch(parts.config, parts.kit, parts.model, parts.mesh.device)
    yield lambda: train_step(parts, batch).loss


@dataclass(frozen=True)
class Footprint:
    """Bytes of one setting."""

    setting: str
    counted: int
    kept: int
    peak: int


def footprint(name: str) -> Footprint:
    """Return the bytes of one microbatch, counted on meta tensors and measured on real tensors."""
    config = config_of(SETTINGS[name])
    planned = build(config, planned_mesh(Grid(config.layout.axes), 0, config.layout.token_axes))
    with AsOnDevice("cpu", "fused"):
        counted, _ = kept_and_peak(planned)
    return Footprint(name, counted, *kept_and_peak(build(config, solo_mesh(torch.device("cpu")))))


def kept_and_peak(parts: Parts) -> tuple[int, int]:
    """Return the bytes alive after the forward pass, and the most in both passes."""
    with LiveBytes() as live:
        halves = passes(parts)
        next(halves)
        left = live.live
        for _ in halves:
            pass
    return left, live.peak


def show_footprints(footprints: list[Footprint]) -> None:
    table = Table(title="a microbatch's activations, MB")
    for head in ("recompute", "counted", "kept", "ratio", "peak", "ratio"):
        table.add_column(head, justify="right")
    first = footprints[0]
    for found in footprints:
        counted, left, peak = (f"{size / 1e6:.1f}" for size in (found.counted, found.kept, found.peak))
        ratios = f"{found.kept / first.kept:.2f}", f"{found.peak / first.peak:.2f}"
        table.add_row(found.setting, counted, left, ratios[0], peak, ratios[1])
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    arguments = plan_arguments("Activation checkpointing: bytes that are kept, and the time of a step.").parse_args()
    torch.set_num_threads(1)
    footprints = [footprint(name) for name in SETTINGS]
    show_footprints(footprints)
    contenders = [
        Contender(name, "benchmarks.recompute:train", {"recompute": setting}, 1) for name, setting in SETTINGS.items()
    ]
    times = measure("a step, one thread", contenders, plan_of(arguments), ["none"])
    tables: dict[str, Any] = {"memory": [asdict(found) for found in footprints], "times": times}
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
