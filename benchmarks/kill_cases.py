"""The layouts for kills: every sync, kit, schedule, context and offload, chunks of stages, mixtures, both transports,
half precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config import Config, parse_config

STEPS = 16
MODEL = {
    "layers": 4, "hidden": 32, "heads": 4, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 16,
    "dropout": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A named layout on a transport; `changes` are other fields of the run."""

    name: str
    transport: str
    layout: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, corpus: Path, steps: int = STEPS) -> Config:
        """Return a tiny run of the layout; threads, dtype and other fields are defaults."""
        tree: dict[str, Any] = {
            "seed": 3,
            "model": MODEL,
            "data": {"source": str(corpus), "sequence": 16},
            "batch": {"global": 16},
            "layout": {**self.layout, "transport": self.transport},
            "optimizer": {"lr": 1e-2},
            "steps": steps,
            "checkpoint": {"every": 4, "keep": 2},
            "restarts": 1,
            "device": "cpu",
            **self.changes,
        }
        return parse_config(tree)


def _data(size: int, sync: str) -> dict[str, Any]:
    return {"data": {"size": size, "sync": sync}}


def _pipe(size: int, schedule: str, **chunks: Any) -> dict[str, Any]:
    return {"pipeline": {"size": size, "schedule": schedule, **chunks}}


BF16 = {"precision": {"level": "O2", "dtype": "bf16"}}
MICRO = {"batch": {"global": 16, "micro": 2}}
PANELS = {"kind": "tesseract", "q": 2, "d": 1}
BRANCHES = {"kind": "subgraph", "size": 2}
V_OF_TWO = _pipe(2, "message-driven", chunks=2, placement="v")
WITHOUT_DROPOUT = {"model": {**MODEL, "dropout": 0.0}}
RINGS = {"context": {"size": 2, "kind": "ring"}}

CASES = (
    Case("allreduce 2", "torch", _data(2, "allreduce")),
    Case("zero1 4", "mpi", _data(4, "zero1")),
    Case("ring 4", "torch", _data(4, "ring")),
    Case("rooted 2", "mpi", _data(2, "rooted")),
    Case("server-gradient 4", "torch", _data(4, "server-gradient")),
    Case("server-loss 2", "mpi", _data(2, "server-loss")),
    Case("zero2 2", "torch", _data(2, "zero2")),
    Case("zero3 2", "torch", _data(2, "zero3")),
    Case("zero3 4, shard groups of 2", "torch", {"data": {"size": 4, "sync": "zero3", "shard": 2}}),
    Case("ulysses 2", "mpi", {"context": {"size": 2}}),
    Case("ring 2 x zero3 2", "torch", {**RINGS, **_data(2, "zero3")}, WITHOUT_DROPOUT),
    Case("megatron 2", "torch", {"tensor": {"kind": "megatron", "size": 2}}),
    Case("megatron 4, sequence", "mpi", {"tensor": {"kind": "megatron", "size": 4, "sequence_parallel": True}}),
    Case("tesseract 2x2", "mpi", {"tensor": PANELS}),
    Case("tesseract 2x2 x data 2", "torch", {"tensor": PANELS, **_data(2, "allreduce")}),
    Case("subgraph all 2", "torch", {"tensor": {**BRANCHES, "common": "all"}}),
    Case("subgraph one 2", "mpi", {"tensor": {**BRANCHES, "common": "one"}}),
    Case("gpipe 2", "torch", _pipe(2, "gpipe"), MICRO),
    Case("1f1b 2", "mpi", _pipe(2, "1f1b"), MICRO),
    Case("axonn 2", "torch", _pipe(2, "axonn"), MICRO),
    Case("message-driven 4", "mpi", _pipe(4, "message-driven"), MICRO),
    Case("1f1b 2, loop of 2 chunks", "mpi", _pipe(2, "1f1b", chunks=2), MICRO),
    Case("message-driven 2, v of 2 chunks x zero3 2", "torch", {**_data(2, "zero3"), **V_OF_TWO}, MICRO),
    Case("data 2 x pipe 2", "torch", {**_data(2, "zero1"), **_pipe(2, "message-driven")}, MICRO),
    Case("offload host 2", "mpi", _data(2, "allreduce"), {**BF16, "memory": {"offload": {"to": "host"}}}),
    Case("offload disk 2", "torch", _data(2, "allreduce"), {**BF16, "memory": {"offload": {"to": "disk"}}}),
    Case("bf16 zero1 2", "torch", _data(2, "zero1"), BF16),
    Case("bf16 pipe 2 x data 2", "mpi", {**_pipe(2, "1f1b"), **_data(2, "ring")}, {**BF16, **MICRO}),
)
