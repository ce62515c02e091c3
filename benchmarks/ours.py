"""The adapter between the harness and Meshwright: a contender's factory over `meshwright.build`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.contender import Contender, Place, Step
from benchmarks.reference import REFERENCE, global_batch
from meshwright.allocator import keep_freed_memory
from meshwright.batch import Batch
from meshwright.build import build
from meshwright.config import Config
from meshwright.environment import read_environment, rendezvous
from meshwright.grid import Grid
from meshwright.mesh import open_mesh


def contender(sync: str, transport: str, ranks: int) -> Contender:
    """One `layout.data.sync` on one `layout.transport`; a single rank is the serial step."""
    name = "meshwright serial" if ranks == 1 else f"{sync} {transport}"
    launcher = "mpi" if transport == "mpi" else "torch"
    options: dict[str, Any] = {"sync": sync, "transport": transport}
    return Contender(name, "benchmarks.ours:train", options, ranks, launcher)  # type: ignore[arg-type]


@contextmanager
def train(place: Place, sync: str = "allreduce", transport: str = "torch") -> Iterator[Step]:
    """Train steps of the reference model as the train loop takes them: the same parts, in the same order."""
    config = reference_config(sync, transport, place.ranks)
    device = torch.device("cpu")
    keep_freed_memory()  # as a worker of `meshwright train` does
    with open_mesh(Grid(config.layout.axes), read_environment(), transport, device, rendezvous()) as mesh:
        parts = build(config, mesh)
        parts.strategy.equalise()
        count = 0

        def step() -> float:
            nonlocal count
            tokens, labels = global_batch(count)

            def load(first: int, rows: int) -> Batch:
                return {"tokens": tokens[first : first + rows], "labels": labels[first : first + rows]}

            batch = parts.strategy.share(load, config.replica_batch)
            loss = parts.strategy.backward(parts.model, batch, {"labels": 1.0 / labels.numel()}, final=True)
            parts.strategy.finish()
            parts.optimizer.step(count)
            parts.strategy.publish()
            count += 1
            return loss.item()

        yield step


def reference_config(sync: str, transport: str, ranks: int) -> Config:
    """benchmarks/reference.py as a run's config. Gradients are not clipped: the baselines do not clip."""
    return Config.model_validate(
        {
            "model": {
                "layers": REFERENCE.layers,
                "hidden": REFERENCE.hidden,
                "heads": REFERENCE.heads,
                "positions": REFERENCE.sequence,
                "vocabulary": REFERENCE.vocabulary,
                "tied": False,
                "dropout": 0.0,
            },
            "data": {"sequence": REFERENCE.sequence},
            "batch": {"global": REFERENCE.batch},
            "layout": {"data": {"size": ranks, "sync": sync}, "transport": transport},
            "optimizer": {
                "lr": REFERENCE.learning_rate,
                "betas": REFERENCE.betas,
                "weight_decay": REFERENCE.weight_decay,
                "clip": None,
            },
            "device": "cpu",
            "threads": 1,
        }
    )
