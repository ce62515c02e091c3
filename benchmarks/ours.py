"""The adapter between the harness and Meshwright: a contender's factory over `meshwright.training.parts`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import yaml

from benchmarks.contender import Contender, Option, Place, Step
from benchmarks.reference import REFERENCE, global_batch
from meshwright.compute.model import Batch
from meshwright.compute.models.chain import chain_of
from meshwright.config import Config
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.machine import Machine, keep_freed_memory
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.training.decisions import resolve_layout
from meshwright.training.parts import Parts, build
from meshwright.training.step import train_step


def contender(sync: str, transport: str, ranks: int, *, waits: bool = False) -> Contender:
    """One `layout.data.sync` on one `layout.transport`; a single rank is the serial step. `waits`: a step ends when the
    stepped weights have arrived, which otherwise travel under the next forward pass."""
    name = "meshwright serial" if ranks == 1 else f"{sync} {transport}" + ", waiting" * waits
    made = configured(name, transport, {"layout.data.sync": sync, "layout.data.size": ranks})
    return replace(made, options=made.options | {"waits": True}) if waits else made


def tensor_contender(name: str, transport: str, tensor: Mapping[str, Option]) -> Contender:
    """One `layout.tensor` on one `layout.transport`, without data parallelism."""
    return configured(f"{name} {transport}", transport, {f"layout.tensor.{key}": tensor[key] for key in tensor})


def pipeline_contender(
    schedule: str, transport: str, partition: str, microbatches: int, placement: str | None = None
) -> Contender:
    """One `layout.pipeline.schedule` with layers on each stage as in `3+1`; with a placement on each of two chunks a
    stage, in the model's order."""
    positions = partition.split("+")
    options: dict[str, Option] = {
        "layout.pipeline.size": len(positions) // (2 if placement else 1),
        "layout.pipeline.schedule": schedule,
        "layout.pipeline.partition": f"[{', '.join(positions)}]",
        "batch.micro": REFERENCE.batch // microbatches,
    }
    if placement:
        options |= {"layout.pipeline.chunks": 2, "layout.pipeline.placement": placement}
    name = " ".join([schedule, *([placement] if placement else []), partition, transport])
    return configured(name, transport, options)


def configured(name: str, transport: str, options: dict[str, Option]) -> Contender:
    """`options`: fields of the run's config, as on the command line; `model` replaces the reference model."""
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    options = options | {"layout.transport": transport}
    ranks = reference_config(options).layout.world_size
    return Contender(name, "benchmarks.ours:train", options, ranks, launcher)


@contextmanager
def train(place: Place, *, waits: bool = False, **options: Option) -> Iterator[Step]:
    """Train steps of a model as the train loop takes them: the same parts, in order. `waits`: see contender."""
    config = reference_config(options)
    assert config.threads != "auto", "a worker's threads"
    torch.set_num_threads(config.threads)
    with open_layout(config) as mesh:
        yield steps_of(build(resolve_layout(config, Machine.here()).config, mesh), waits=waits)


@contextmanager
def open_layout(config: Config) -> Iterator[Mesh]:
    """This worker's mesh, in a process that is set up as a worker of `meshwright train` is."""
    layout, device = config.layout, torch.device("cpu")
    keep_freed_memory()
    environment = read_environment()
    with open_mesh(config.grid, environment, layout.transport, device, rendezvous(), layout.token_axes) as mesh:
        yield mesh


def steps_of(parts: Parts, *, waits: bool = False) -> Step:
    """A step of the train loop, over and over."""
    steps = itertools.count()
    parts.strategy.make_replicas_equal()

    def step() -> float:
        count = next(steps)
        return train_step(parts, _batch(parts.config, count), count, wait=waits).loss

    return step


def _batch(config: Config, step: int) -> Batch:
    """A step's global batch: the reference's tokens, for another family random ones of which nothing is padding."""
    if config.model.family == "gpt2":
        tokens, labels = global_batch(step)
        return {"tokens": tokens, "labels": labels}
    generator = torch.Generator().manual_seed(step)
    shapes, vocabulary = chain_of(config).sample_shapes(config), REFERENCE.vocabulary
    rows = config.batch.global_
    return {
        name: torch.ones(rows, *shape, dtype=torch.long) if name.endswith("mask")
        else torch.randint(vocabulary, (rows, *shape), generator=generator)
        for name, shape in shapes.items()
    }  # fmt: skip


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
