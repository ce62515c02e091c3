"""Stepped weights are sent during the next forward pass, and read only after the wait.

Weights in transfer are NaN here until the wait, so that an early read is an error. Planted mistakes prove this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.compute.model import EMBEDDINGS, HEAD, Batch
from meshwright.compute.models.chain import run_directly
from meshwright.compute.parameters.bucket import Bucket
from meshwright.config import Config
from meshwright.ranks.comm import Comm, Later, Work
from meshwright.ranks.errors import MeshwrightError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.loop import Trainer, validate
from meshwright.training.parts import Parts
from tests.harness import build
from tests.oracle.data_parallel import config_for
from tests.training.replicas import Rows
from tests.workers import run_ranks

STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"data": {"size": 2, "sync": "zero1", "bucket": 8192}},
    "zero1, stages that share a table": {
        "data": {"size": 2, "sync": "zero1", "bucket": 8192}, "pipeline": {"size": 2},
    },
    "zero2": {"data": {"size": 2, "sync": "zero2", "bucket": 8192}},
    "server-gradient": {"data": {"size": 2, "sync": "server-gradient", "bucket": 8192}},
}  # fmt: skip


class Validated(Rows):
    def held_out(self, first: int, count: int) -> Batch:
        return self.samples(first, count)


def config_of(layout: dict[str, Any]) -> Config:
    return config_for("allreduce", 1, layout=layout, batch={"global": 12, "micro": 3}, check={"every": 1})


def poison(parts: Parts, events: list[str]) -> None:
    """Fill values in transfer with NaN until the wait, except the slot that this rank has stepped."""
    strategy: Any = parts.strategy
    publish, run_part = strategy.policy.publish, parts.model.run_part

    def poisoned(bucket: Bucket, comm: Comm) -> Work:
        start, stop = strategy.policy.owned(bucket, comm)
        publish(bucket, comm).wait()
        arrived = bucket.values.clone()
        bucket.values[:start] = torch.nan
        bucket.values[stop:] = torch.nan
        index = next(index for index, one in enumerate(strategy.buckets) if one is bucket)
        events.append(f"publish {index}")

        def wait() -> None:
            bucket.values.copy_(arrived)
            events.append(f"arrived {index}")

        return Later(wait)

    def traced(part: int, function: Callable[..., Any], *arguments: Any) -> Any:
        def computed(*arguments: Any) -> Any:
            events.append({EMBEDDINGS: "embeddings", HEAD: "head"}.get(part, f"layer {part}"))
            return function(*arguments)

        return run_part(part, computed, *arguments)

    strategy.policy.publish = poisoned
    parts.model.run_part = traced


def without_parts(trainer: Trainer) -> None:
    """Plant a model with parts that wait for no weights."""
    trainer.parts.model.run_part = run_directly


def without_waits(trainer: Trainer) -> None:
    """Plant a read of weights without the wait."""
    strategy: Any = trainer.parts.strategy
    wait = strategy._wait
    strategy._wait = lambda indices=None: None if indices is None else wait(indices)


MISTAKES: dict[str, Callable[[Trainer], None]] = {"parts": without_parts, "between steps": without_waits}


def trained(mesh: Mesh, config: Config, poisons: bool, mistake: str) -> dict[str, Any]:
    """Make some steps, with every reader of weights between the steps. Return the numbers, or the error that ended the
    steps."""
    parts, events = build(config, mesh), list[str]()
    trainer = Trainer(parts, Validated(config))
    if poisons:
        poison(parts, events)
    if mistake:
        MISTAKES[mistake](trainer)
    lines: list[dict[str, object]] = []
    try:
        for step in range(STEPS):
            lines += trainer.turn(None)[0]
            if step == 1:
                lines[-1] |= validate(parts, trainer.train, 1)
            if step == 2:
                trainer.require_good_state()
    except MeshwrightError as error:
        return {"error": str(error)}
    numbers = [
        tuple(str(line.get(key)) for key in ("loss", "grad_norm", "validation_loss", "validation_accuracy"))
        for line in lines
    ]
    return {"numbers": numbers, "weights": [flat.values.clone() for flat in parts.strategy.weights], "events": events}


@pytest.fixture(autouse=True)
def own_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use gloo's own verbs, which take time. Ranks of one node would gather at once, in shared memory."""
    monkeypatch.setattr("meshwright.ranks.torch_comm.open_window", lambda *arguments: None)


def run(name: str, poisons: bool, mistake: str = "") -> list[dict[str, Any]]:
    config = config_of(LAYOUTS[name])
    return run_ranks(trained, Grid(config.layout.axes), config, poisons, mistake)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "zero1" else pytest.mark.long) for name in LAYOUTS]
)
def test_nobody_reads_weights_that_are_on_their_way(name: str) -> None:
    for plain, poisoned in zip(run(name, False), run(name, True), strict=True):
        assert poisoned["numbers"] == plain["numbers"]
        assert all(map(torch.equal, plain["weights"], poisoned["weights"]))
        if name == "zero1":
            assert_travels_under_the_forward_pass(poisoned["events"])


def assert_travels_under_the_forward_pass(events: list[str]) -> None:
    """Assert that buckets are sent in the order of the forward pass's reads, and that each part waits for the part's
    own buckets."""
    first = events.index("publish 0") + 1
    published = [event for event in events[:first] if event.startswith("publish")]
    assert published == [f"publish {index}" for index in range(len(published))][::-1]
    following = events[first : events.index("head", first)]
    assert following.index("embeddings") < following.index("layer 0") < following.index("layer 1")
    under = [event for event in following[following.index("embeddings") :] if event.startswith("arrived")]
    assert len(under) >= len(published) // 2, following


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    for told in run("zero1", True, mistake):
        assert "not finite" in told["error"]
