"""The adapter between the harness and Meshwright: a contender's factory over `meshwright.build`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.contender import Contender, Option, Place, Step
from benchmarks.reference import REFERENCE, global_batch
from meshwright.allocator import keep_freed_memory
from meshwright.batch import Batch
from meshwright.build import build
from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.environment import read_environment, rendezvous
from meshwright.grid import Grid
from meshwright.mesh import open_mesh


def contender(sync: str, transport: str, ranks: int) -> Contender:
    """One `layout.data.sync` on one `layout.transport`; a single rank is the serial step."""
    name = "meshwright serial" if ranks == 1 else f"{sync} {transport}"
    return _contender(name, transport, ranks, {"sync": sync})


def tensor_contender(name: str, transport: str, tensor: Mapping[str, Option]) -> Contender:
    """One `layout.tensor` on one `layout.transport`, without data parallelism."""
    ranks = Layout.model_validate({"tensor": tensor}).world_size
    return _contender(f"{name} {transport}", transport, ranks, {**tensor})


def _contender(name: str, transport: str, ranks: int, options: dict[str, Option]) -> Contender:
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    return Contender(name, "benchmarks.ours:train", options | {"transport": transport}, ranks, launcher)


@contextmanager
def train(place: Place, sync: str = "allreduce", transport: str = "torch", **tensor: Option) -> Iterator[Step]:
    """Train steps of the reference model as the train loop takes them: the same parts, in the same order.

    `tensor`: the fields of layout.tensor; none is its default.
    """
    config = reference_config(sync, transport, place.ranks, tensor)
    layout = config.layout
    device = torch.device("cpu")
    keep_freed_memory()  # as a worker of `meshwright train` does
    with open_mesh(Grid(layout.axes), read_environment(), transport, device, rendezvous(), layout.token_axes) as mesh:
        parts = build(config, mesh)
        parts.strategy.equalise()
        count = 0

        def step() -> float:
            nonlocal count
            tokens, labels = global_batch(count)

            def load(first: int, rows: int) -> Batch:
                return {"tokens": tokens[first : first + rows], "labels": labels[first : first + rows]}

            replica = parts.strategy.share(load, config.replica_batch)
            batch = {name: parts.kit.slice_batch(x) for name, x in replica.items()}
            loss = parts.strategy.backward(parts.model, batch, {"labels": 1.0 / labels.numel()}, final=True)
            parts.strategy.finish()
            parts.optimizer.step(count)
            parts.strategy.publish()
            parts.kit.end_step()
            count += 1
            return loss.item()

        yield step


def reference_config(sync: str, transport: str, ranks: int, tensor: Mapping[str, Option]) -> Config:
    """benchmarks/reference.py as a run's config. Gradients are not clipped: the baselines do not clip."""
    split = {"tensor": tensor} if tensor else {}
    replicas = ranks // Layout.model_validate(split).world_size
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
            "layout": {"data": {"size": replicas, "sync": sync}, "transport": transport, **split},
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
