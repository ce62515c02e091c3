"""The whole states of all ranks, to compare layouts, and training between two checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch._dynamo  # imported at the first use of an optimizer of torch: 1 s in every forked rank
from torch import Tensor

from meshwright.config import Config
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.ranks.mesh import Mesh
from meshwright.training.checkpoint import Checkpoint, CheckpointWriter, pieces_of, restore
from meshwright.training.checkpoint.manifest import Origin
from meshwright.training.checkpoint.restore import progress_of
from meshwright.training.parts import Parts
from tests.harness import build
from tests.oracle.run import train_step

States = dict[tuple[str, str], Tensor]
"""Whole tensors by kind and parameter."""

Leg = tuple[list[float], list["Held"], list["Held"]]
"""A leg's losses, and this rank's restored and written states."""

Held = tuple[str, str, tuple[int, ...], tuple[int, ...], Tensor]
"""Kind, parameter, its global shape, offsets, the part."""


RUN = "5eed"
TOKENIZER = byte_tokenizer().to_json()


def open_writer(mesh: Mesh, config: Config, folder: Path, keep: int = 9) -> CheckpointWriter:
    origin = Origin(config.model_dump(mode="json", by_alias=True), run=RUN)
    return CheckpointWriter(folder, mesh, keep, origin, {"tokenizer.json": TOKENIZER})


def held_by(parts: Parts) -> list[Held]:
    return [
        (
            state.kind,
            place.name,
            place.shape,
            place.box.offsets,
            state.values[place.start : place.stop].view(place.box.lengths).clone(),
        )
        for slot, states in parts.stored()
        if parts.mesh.index(*slot.copy_axes) == 0
        for state in states
        for place in state.places
    ]


def whole(ranks: list[list[Held]]) -> States:
    """Return the global tensors. Raises AssertionError unless exactly one rank holds each element."""
    states: States = {}
    counts: States = {}
    for kind, name, shape, offsets, part in (held for rank in ranks for held in rank):
        slices = tuple(slice(start, start + length) for start, length in zip(offsets, part.shape, strict=True))
        states.setdefault((kind, name), torch.zeros(shape, dtype=part.dtype))[slices] = part
        counts.setdefault((kind, name), torch.zeros(shape))[slices] += 1
    assert all(bool((count == 1).all()) for count in counts.values()), "an element is written twice, or not at all"
    return states


def run_leg(mesh: Mesh, config: Config, source: Path | None, target: Path | None, first: int, last: int) -> Leg:
    """Train steps first..last-1 from the checkpoint `source` or the seed, and write a checkpoint to `target`."""
    parts = build(config, mesh, drawn=source is None)
    if source is not None:
        assert restore(parts, Checkpoint(source)).step == first
    assert parts.strategy.make_replicas_equal() == []
    taken_up = held_by(parts)
    losses = []
    for step in range(first, last):
        loss, _ = train_step(parts, step)
        losses.append(loss)
    if target is not None:
        writer = open_writer(mesh, config, target)
        writer.save(progress_of(parts, last, last * config.batch.global_), pieces_of(parts))
        writer.wait()
    return losses, taken_up, held_by(parts)
