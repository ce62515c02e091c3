"""One measured run of one layout: a launched job with the steps of `meshwright train`.

The job writes metrics.jsonl, one line a step in train's form, and rank-R.json, a rank's facts. The job makes no
checkpoints and no validation, so that only steps are timed.

Each rank counts its own bytes:

| part | counted bytes |
|---|---|
| weights, gradients | flat memory of the buckets, padding included |
| states | the optimizer's tensors other than weights; master weights of half-precision weights |

For an offloaded optimizer, states are the staging memory on the device (memory/staging.py), without the number that
counts steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.compute.model import Samples
from meshwright.config import Config, run_text
from meshwright.ranks.foreign import parse_json, read_text
from meshwright.ranks.grid import PIPE
from meshwright.ranks.launch import Rank, run
from meshwright.strategies.memory.offload import Offloaded
from meshwright.training.decisions import resolve, this_machine
from meshwright.training.loop import Trainer
from meshwright.training.metrics import MetricsWriter
from meshwright.training.parts import Parts, build
from meshwright.training.step import backward, publish
from meshwright.training.step_report import peak_memory_bytes


@dataclass(frozen=True)
class SentCalls:
    """Number of calls of a verb along an axis in one step, and the bytes sent."""

    axis: str
    verb: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class RankFacts:
    """One rank's measured facts. `held`: bytes of weights, gradients and states between two steps. `peak_bytes`: the
    rank's peak memory. `sent`: calls and bytes sent in a step."""

    rank: int
    stage: int
    held: dict[str, int]
    peak_bytes: int
    sent: tuple[SentCalls, ...]

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Sum the bytes sent in a step by axis."""
        totals: dict[str, int] = {}
        for sent in self.sent:
            totals[sent.axis] = totals.get(sent.axis, 0) + sent.bytes
        return totals


@dataclass(frozen=True)
class MeasuredRun:
    """One run's results. `losses`, `seconds`, `phases`: one entry a step, in order; `phases` are rank 0's."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    ranks: tuple[RankFacts, ...]


def measure_run(config: Config, data: Path, folder: Path, steps: int) -> MeasuredRun:
    """Make `steps` steps of a layout from initial weights, in a new folder, and read the results.

    Raises LaunchError and Interrupted, as the launcher.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(run_text(config), encoding="utf-8")
    config = resolve(config, this_machine()).config
    ranks = config.ranks(name="compare")
    # As in train, the config was resolved before ranks start, by the launcher's view of the machine.
    facts = run(run_on_rank, ranks, config=config, data=data, folder=folder.absolute(), steps=steps)
    lines = [parse_json(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
    return MeasuredRun(
        losses=tuple(float(line["loss"]) for line in lines),
        seconds=tuple(float(line["step_seconds"]) for line in lines),
        phases=tuple(line["phase_seconds"] for line in lines),
        ranks=tuple(RankFacts(**of | {"sent": tuple(SentCalls(**sent) for sent in of["sent"])}) for of in facts),
    )


def run_on_rank(rank: Rank, config: Config, data: Path, folder: Path, steps: int) -> dict[str, Any] | None:
    """Run one rank, and return the rank's facts; None if a stop was requested."""
    mesh = rank.mesh
    parts = build(config, mesh, folder)
    train = config.data.open(config, data).train
    trainer = Trainer(parts, train)
    metrics = MetricsWriter(folder, 0) if mesh.rank == 0 else None
    for _ in range(steps):
        lines, stopping = trainer.turn(rank.stop)
        # A GPU's step is settled during the next step; the last step has no next one.
        lines += trainer.flush() if trainer.step == steps else ()
        if metrics is not None:
            for line in lines:
                metrics.write(line)
        if stopping:
            return None
    if metrics is not None:
        metrics.close()
    held, peak_bytes, seen = resident_bytes(parts), peak_memory_bytes(mesh.device), trainer.batch.samples
    facts = asdict(RankFacts(mesh.rank, mesh.index(PIPE), held, peak_bytes, count_sent(parts, train, seen)))
    (folder / f"rank-{mesh.rank}.json").write_text(json.dumps(facts))
    return facts


def resident_bytes(parts: Parts) -> dict[str, int]:
    """Count bytes of weights, gradients and states on a rank that has made a step."""
    slots = parts.strategy.slots  # views of whole buckets, even if the rank steps only a part of one
    frozen = [bucket_sum.slot for bucket_sum in parts.strategy.frozen]
    weights = storages(slot.parameter.detach() for slot in (*slots, *frozen))
    gradients = storages(slot.parameter.grad for slot in slots if slot.parameter.grad is not None)
    if isinstance(parts.optimizer.held, Offloaded):
        states = parts.optimizer.held.staging.num_bytes
    else:
        tensors = (tensor for index in range(len(slots)) for tensor in parts.optimizer.held.tensors(index).values())
        states = sum(size for address, size in storages(tensors).items() if address not in weights)
    return {"weights": sum(weights.values()), "gradients": sum(gradients.values()), "states": states}


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each distinct storage of some tensors, by address."""
    pieces = (tensor.untyped_storage() for tensor in tensors)
    return {piece.data_ptr(): piece.nbytes() for piece in pieces if piece.nbytes()}


def count_sent(parts: Parts, train: Samples, samples: int) -> tuple[SentCalls, ...]:
    """Count this rank's sends in one step: passes, gradient reductions, publishing of weights. The norm and the step
    report are left out, as in a plan (plan/predict.py).

    Runs these parts of a step again, and changes the gradients: call this function last.
    """
    config, ledger = parts.config, parts.mesh.ledger
    before = {key: (entry.calls, entry.sent_bytes) for key, entry in ledger.traffic.items()}
    backward(parts, train.samples(samples, config.batch.global_), samples // config.batch.global_)
    parts.strategy.finish()
    publish(parts)
    sent = []
    for (axis, verb), entry in sorted(ledger.traffic.items()):
        calls, sent_bytes = before.get((axis, verb), (0, 0))
        # An axis used only by the norm and the report has no new calls.
        if entry.calls > calls:
            sent.append(SentCalls(axis, verb, entry.calls - calls, entry.sent_bytes - sent_bytes))
    return tuple(sent)
