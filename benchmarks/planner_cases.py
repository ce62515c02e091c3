"""The planner's cases: two models; layouts of every kit, synchroniser and schedule at 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.contender import Option
from benchmarks.ours import reference_config
from meshwright.config import Config

Options = dict[str, Option]

SHAPES: dict[str, Options] = {
    "reference": {},
    "wide": {"model.hidden": 512, "model.layers": 2, "batch.global": 4},
}
"""`wide`: twice the hidden width for half the tokens, so that parameters weigh more."""

SYNCS = ("allreduce", "ring", "zero1")
SCHEDULES = ("gpipe", "1f1b", "axonn", "message-driven")
BRANCHES = ("attention-core", "attention", "block")


@dataclass(frozen=True)
class Case:
    """A layout of a shape on a transport."""

    shape: str
    name: str
    transport: str
    options: Options

    @property
    def config(self) -> Config:
        return reference_config(self.options)

    @property
    def ranks(self) -> int:
        return self.config.layout.world_size


def cases(shape: str, transport: str, ranks: Sequence[int]) -> Iterator[Case]:
    """Yield all cases of a shape on a transport."""
    for count in ranks:
        for name, options in _layouts(count):
            yield Case(shape, name, transport, SHAPES[shape] | options | {"layout.transport": transport})


def _layouts(ranks: int) -> Iterator[tuple[str, Options]]:
    if ranks == 1:
        yield "serial", {}
        return
    for sync in SYNCS:
        yield f"{sync} {ranks}", _data(ranks, sync)
    yield f"megatron {ranks}", _megatron(ranks)
    yield f"megatron {ranks} sequence", _megatron(ranks) | {"layout.tensor.sequence_parallel": True}
    for branch in BRANCHES:
        fields: Options = {"kind": "subgraph", "size": ranks, "common": "all", "branch": branch}
        yield f"subgraph {ranks} {branch}", {f"layout.tensor.{key}": value for key, value in fields.items()}
    one: Options = {"kind": "subgraph", "size": ranks, "common": "one", "branch": "block"}
    yield f"cSub {ranks} block", {f"layout.tensor.{key}": value for key, value in one.items()}
    for schedule in SCHEDULES:
        yield f"pipe {ranks} {schedule}", _pipe(ranks, schedule)
    if ranks == 4:
        yield "tesseract 2x2", {"layout.tensor.kind": "tesseract", "layout.tensor.q": 2, "layout.tensor.d": 1}
        yield "data 2 x megatron 2", _data(2, "allreduce") | _megatron(2)
        yield "data 2 x pipe 2", _data(2, "allreduce") | _pipe(2, "message-driven")
        yield "pipe 2 x megatron 2", _pipe(2, "1f1b") | _megatron(2)


def _data(ranks: int, sync: str) -> Options:
    return {"layout.data.size": ranks, "layout.data.sync": sync}


def _megatron(ranks: int) -> Options:
    return {"layout.tensor.kind": "megatron", "layout.tensor.size": ranks}


def _pipe(stages: int, schedule: str) -> Options:
    return {"layout.pipeline.size": stages, "layout.pipeline.schedule": schedule}
