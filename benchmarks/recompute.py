"""Activation checkpointing: what a forward pass keeps, and what computing it again costs.

    python -m benchmarks.recompute [--rounds N] [--steps N] [--json FILE]

A GPT-2 of 12 layers, hidden 256, sequence 256, dropout 0.1, one microbatch of 2 sequences, float32, one thread.
Bytes: `counted` is what autograd keeps of a forward pass, counted on tensors without numbers (memory/activations.py),
which does not see the inputs that recomputed groups keep. `kept` and `peak` are measured: the memory of all tensors
that a forward pass has made and left alive, and the most alive at any time in the forward and the backward pass.
(Gradients are written into their buckets, which are there before.) Times: a whole step, all settings in turns.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.contender import Contender, Place, Step
from benchmarks.interleave import Plan, as_json, interleave, plan_arguments, show, write_json
from meshwright.config import Config, parse_config
from meshwright.data_parallel.strategy import Synchroniser
from meshwright.memory.recompute import kept_bytes
from meshwright.parts import Parts, build, empty_batch
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import solo_mesh
from meshwright.ranks.planned import planned_mesh
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
    """A forward pass, then, when asked for more, its backward pass."""
    batch = empty_batch(parts.config, parts.kit, parts.model.inside, parts.mesh.device)
    (loss,) = parts.model(batch, {"labels": 1e-3})
    yield
    loss.backward()


@contextmanager
def train(place: Place, recompute: Any) -> Iterator[Step]:
    """A contender, on a batch of zeros."""
    parts = build(config_of(recompute), solo_mesh(torch.device("cpu")))
    batch = empty_batch(parts.config, parts.kit, parts.model.inside, parts.mesh.device)
    yield lambda: train_step(parts, batch).loss


@dataclass(frozen=True)
class Footprint:
    """Bytes of one setting."""

    setting: str
    counted: int
    kept: int
    peak: int


class Alive(TorchDispatchMode):
    """Counts the bytes of the memory that tensors hold and that was not `there` before, and the most at any time."""

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in there}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, out)
        return out

    def _see(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, address, size)

    def _gone(self, address: int, size: int) -> None:
        self._known.remove(address)
        self.bytes -= size


def footprint(name: str) -> Footprint:
    """One microbatch's bytes: a plan counts what autograd keeps, a run what tensors hold."""
    config = config_of(SETTINGS[name])
    planned = build(config, planned_mesh(Grid(config.layout.axes), 0, config.layout.token_axes))
    counted = kept_bytes(lambda: next(passes(planned)), planned.model.parameters())
    parts = build(config, solo_mesh(torch.device("cpu")))
    assert isinstance(parts.strategy, Synchroniser)
    flat = [x for bucket in parts.strategy.buckets for x in (bucket.values, bucket.gradients)]
    with Alive(flat) as alive:
        halves = passes(parts)
        next(halves)
        kept = alive.bytes
        for _ in halves:
            pass
    return Footprint(name, counted, kept, alive.peak)


def show_footprints(footprints: list[Footprint]) -> None:
    table = Table(title="a microbatch's activations, MB")
    for head in ("recompute", "counted", "kept", "ratio", "peak", "ratio"):
        table.add_column(head, justify="right")
    first = footprints[0]
    for found in footprints:
        counted, kept, peak = (f"{size / 1e6:.1f}" for size in (found.counted, found.kept, found.peak))
        ratios = f"{found.kept / first.kept:.2f}", f"{found.peak / first.peak:.2f}"
        table.add_row(found.setting, counted, kept, ratios[0], peak, ratios[1])
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    arguments = plan_arguments("Activation checkpointing: bytes that are kept, and the time of a step.").parse_args()
    torch.set_num_threads(1)
    footprints = [footprint(name) for name in SETTINGS]
    show_footprints(footprints)
    contenders = [
        Contender(name, "benchmarks.recompute:train", {"recompute": setting}, 1) for name, setting in SETTINGS.items()
    ]
    results = interleave(contenders, Plan(arguments.rounds, arguments.steps, warmup=1))
    show("a step, one thread", results, ["none"])
    tables: dict[str, Any] = {
        "memory": [asdict(found) for found in footprints],
        "times": as_json(results, ["none"]),
    }
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
