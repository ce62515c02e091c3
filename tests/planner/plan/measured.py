"""Bytes that a rank's step sends and holds, by a prediction's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.compute.model import IGNORED, Batch
from meshwright.compute.models.chain import chain_of
from meshwright.config import Config
from meshwright.families.bert.section import ASKED_SHARE, Bert
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.memory.recompute import LiveBytes
from meshwright.strategies.optim.states import InPlace
from meshwright.strategies.pipeline.task import Task
from meshwright.training.parts import Parts
from meshwright.training.step import backward, publish
from tests.harness import build

Counts = dict[tuple[str, str], tuple[int, int]]
"""Calls and bytes by axis and verb."""


@dataclass(frozen=True)
class Measured:
    """Bytes of a rank.

    Attributes:
        states: On the device.
        peak: The most live bytes above the live bytes before the step.
        sent: Of a step, without the norm.
        tasks: A stage's tasks, in the order of execution.
    """

    weights: int
    gradients: int
    states: int
    peak: int
    sent: Counts
    tasks: tuple[Task, ...]


def measured(mesh: Mesh, configs: Sequence[Config]) -> list[Measured]:
    """Measure the step of each config in turn, on one mesh."""
    return [_measured(mesh, config) for config in configs]


def _measured(mesh: Mesh, config: Config) -> Measured:
    parts = build(config, mesh)
    parts.optimizer.prepare_states(0)
    live = LiveBytes()
    sent = _step(parts, live)
    weights = sum(size_bytes(flat.values) for flat in parts.strategy.weights)
    slots = [slot.parameter for slot in parts.strategy.slots]
    kept = {x.grad.untyped_storage()._cdata: x.grad.untyped_storage().nbytes() for x in slots if x.grad is not None}
    gradients = sum(kept.values())
    return Measured(
        weights=weights,
        gradients=gradients,
        states=_state_bytes(parts),
        peak=live.peak + sum(parts.strategy.most_bytes) - gradients - weights,
        sent=sent,
        tasks=tuple(task for task, _, _ in parts.pipeline.done),
    )


def _step(parts: Parts, live: LiveBytes) -> Counts:
    """Run a step of the train loop; return the sent calls and bytes. All tokens are valid except tokens that BERT does
    not predict."""
    traffic = parts.mesh.ledger.traffic
    traffic.clear()
    with live:
        backward(parts, batch_of(parts.config, parts.config.batch.global_))
        parts.strategy.finish()
        sent = {key: (entry.calls, entry.sent_bytes) for key, entry in traffic.items()}
        parts.optimizer.step(0)
        traffic.clear()
        publish(parts)
    for key, entry in traffic.items():
        calls, size = sent.get(key, (0, 0))
        sent[key] = calls + entry.calls, size + entry.sent_bytes
    return sent


def batch_of(config: Config, samples: int) -> Batch:
    """Return a batch with the planned number of labelled tokens."""
    shapes = chain_of(config).sample_shapes(config)
    rows = {name: torch.ones(samples, *shape, dtype=torch.long) for name, shape in shapes.items()}
    if isinstance(config.model, Bert):
        length = config.data.lengths.source
        rows["labels"][:, max(1, round(ASKED_SHARE * length)) :] = IGNORED
    return rows


def _state_bytes(parts: Parts) -> int:
    """Return the bytes of masters and moments on the device; if offloaded, the bytes of the staging memory."""
    held = parts.optimizer.held
    if parts.config.memory.offload.to != "none":
        return held.staging.num_bytes
    assert isinstance(held, InPlace)
    masters = [master for slot, master in zip(held.slots, held.masters, strict=True) if master is not slot.parameter]
    states = (held.tensors(index) for index in range(len(held.slots)))
    moments = [x for state in states for kind, x in state.items() if kind != "weight"]
    return sum(size_bytes(x) for x in (*masters, *moments))
