"""The adapter between the harness and Meshwright: a contender's factory over `meshwright.build`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import yaml

from benchmarks.contender import Contender, Option, Place, Step
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
    return _contender(name, transport, {"layout.data.sync": sync, "layout.data.size": ranks})


def tensor_contender(name: str, transport: str, tensor: Mapping[str, Option]) -> Contender:
    """One `layout.tensor` on one `layout.transport`, without data parallelism."""
    return _contender(f"{name} {transport}", transport, {f"layout.tensor.{key}": tensor[key] for key in tensor})


def pipeline_contender(schedule: str, transport: str, partition: str, microbatches: int) -> Contender:
    """One `layout.pipeline.schedule` with layers on each stage as in `3+1`."""
    stages = partition.split("+")
    options: dict[str, Option] = {
        "layout.pipeline.size": len(stages),
        "layout.pipeline.schedule": schedule,
        "layout.pipeline.partition": f"[{', '.join(stages)}]",
        "batch.micro": REFERENCE.batch // microbatches,
    }
    return _contender(f"{schedule} {partition} {transport}", transport, options)


def _contender(name: str, transport: str, options: dict[str, Option]) -> Contender:
    """`options`: fields of the run's config."""
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    options = options | {"layout.transport": transport}
    ranks = reference_config(options).layout.world_size
    return Contender(name, "benchmarks.ours:train", options, ranks, launcher)


@contextmanager
def train(place: Place, **options: Option) -> Iterator[Step]:
    """Train steps of the reference model as the train loop takes them: the same parts, in the same order."""
    config = reference_config(options)
    layout = config.layout
    device = torch.device("cpu")
    keep_freed_memory()  # as a worker of `meshwright train` does
    transport = layout.transport
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
            scales = {"labels": 1.0 / labels.numel()}
            loss = parts.passes.train(parts.microbatches(replica), scales, torch.manual_seed)
            parts.strategy.finish()
            parts.optimizer.step(count)
            parts.strategy.publish()
            parts.kit.end_step()
            count += 1
            return loss.item()

        yield step


def reference_config(options: Mapping[str, Option]) -> Config:
    """benchmarks/reference.py as a run's config, with `options`. No clipping: the baselines do not clip."""
    tree: dict[str, Any] = {
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
        "layout": {},
        "optimizer": {
            "lr": REFERENCE.learning_rate,
            "betas": REFERENCE.betas,
            "weight_decay": REFERENCE.weight_decay,
            "clip": None,
        },
        "device": "cpu",
        "threads": 1,
    }
    for field, value in options.items():
        *sections, key = field.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = yaml.safe_load(value) if isinstance(value, str) else value
    return Config.model_validate(tree)
