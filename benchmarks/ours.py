"""The adapter between the harness and Meshwright: a contender's factory over the train loop.

A step is `Trainer.turn` on a config resolved as a run's is (`compile`, hooks, the report to all ranks, the comparison
of replicas), and rank 0's line in metrics.jsonl and TensorBoard, as in ranks of `meshwright train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from benchmarks.contender import Contender, Option, Place, Step
from benchmarks.reference import REFERENCE, Reference, global_batch
from meshwright.compute.model import Batch, rows_of
from meshwright.compute.models.chain import chain_of
from meshwright.config import Config
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.machine import Machine
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.training.decisions import resolve
from meshwright.training.loop import Trainer
from meshwright.training.metrics import MetricsWriter
from meshwright.training.parts import Parts, build
from meshwright.training.sinks import TrackedRun, open_sinks


def contender(sync: str, transport: str, ranks: int) -> Contender:
    """Return one `layout.data.sync` on one `layout.transport`; a single rank is the serial step."""
    name = "meshwright serial" if ranks == 1 else f"{sync} {transport}"
    return configured(name, transport, {"layout.data.sync": sync, "layout.data.size": ranks})


def tensor_contender(name: str, transport: str, tensor: Mapping[str, Option], sizes: Reference) -> Contender:
    """Return one `layout.tensor` on one `layout.transport`, without data parallelism."""
    fields = {f"layout.tensor.{key}": tensor[key] for key in tensor}
    shape = {"model.hidden": sizes.hidden, "model.heads": sizes.heads, "batch.global": sizes.batch}
    return configured(f"{name} {transport}", transport, fields | shape)


def pipeline_contender(
    schedule: str, transport: str, partition: str, microbatches: int, placement: str | None = None
) -> Contender:
    """Return one `layout.pipeline.schedule` with layers on each stage as in `3+1`, or, with a placement, on each of two
    chunks a stage, in the model's order."""
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
    """Return a contender with `options`: fields of the run's config. `model` replaces the reference model."""
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    options = options | {"layout.transport": transport}
    ranks = reference_config(options).layout.world_size
    return Contender(name, "benchmarks.ours:train", options, ranks, launcher)


@contextmanager
def train(place: Place, **options: Option) -> Iterator[Step]:
    """Yield steps of the train loop, of a config resolved as by `meshwright train`."""
    config = resolve(reference_config(options), Machine.here()).config
    assert config.threads != "auto", "a worker's threads"
    torch.set_num_threads(config.threads)
    with open_layout(config) as mesh, steps_of(build(config, mesh)) as step:
        yield step


@contextmanager
def open_layout(config: Config) -> Iterator[Mesh]:
    """Open this worker's mesh."""
    layout, device = config.layout, torch.device("cpu")
    with open_mesh(config.grid, read_environment(), layout.transport, device, rendezvous(), layout.token_axes) as mesh:
        yield mesh


@contextmanager
def steps_of(parts: Parts) -> Iterator[Step]:
    """Yield a step of the train loop, with the line that rank 0 writes to metrics.jsonl and to the trackers.

    A step ends when the stepped weights are on every rank: in a run the weights are sent during the next forward pass,
    here another contender has a turn.
    """
    config, first = parts.config, parts.mesh.rank == 0
    parts.strategy.make_replicas_equal()
    trainer = Trainer(parts, RandomRows(config))
    with TemporaryDirectory() as folder:
        run = TrackedRun.of(config.metrics, Path(folder), "benchmark", config.model_dump(mode="json"), 0)
        metrics = MetricsWriter(Path(folder), 0, open_sinks(config.metrics, run)) if first else None

        def step() -> float:
            lines, _ = trainer.turn(None)
            if metrics is not None:
                for line in lines:
                    metrics.write(line)
            for bucket in parts.strategy.every:
                bucket.wait()
            return float(str(lines[-1]["loss"]))

        yield step
        if metrics is not None:
            metrics.close()


@dataclass(frozen=True)
class RandomRows:
    """A data set of each step's global batch: next-token pairs, for another family random entries without padding."""

    config: Config

    def __len__(self) -> int:
        return 1000 * self.config.batch.global_

    def samples(self, first: int, count: int) -> Batch:
        step, row = divmod(first, self.config.batch.global_)
        return rows_of(self._global(step), slice(row, row + count))

    def held_out(self, first: int, count: int) -> Batch:
        raise AssertionError("nothing is validated here")

    def _global(self, step: int) -> Batch:
        config, rows = self.config, self.config.batch.global_
        shapes = chain_of(config).sample_shapes(config)
        if shapes.keys() == {"tokens", "labels"}:
            (length,) = shapes["tokens"]
            sizes = replace(REFERENCE, batch=rows, sequence=length, vocabulary=config.model.vocabulary)
            tokens, labels = global_batch(step, sizes)
            return {"tokens": tokens, "labels": labels}
        generator = torch.Generator().manual_seed(step)
        return {
            name: torch.ones(rows, *shape, dtype=torch.long) if name.endswith("mask")
            else torch.randint(REFERENCE.vocabulary, (rows, *shape), generator=generator)
            for name, shape in shapes.items()
        }  # fmt: skip


def reference_config(options: Mapping[str, Option]) -> Config:
    """Return benchmarks/reference.py as a run's config, with `options`. No clipping: the baselines do not clip."""
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
