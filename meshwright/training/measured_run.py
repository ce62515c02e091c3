"""One run of one layout: a launched job that makes the steps of `meshwright train`.

Left in its folder: metrics.jsonl, with a line a step as train writes it; rank-R.json, a rank's facts. No checkpoints
and no validation, so that only steps are timed.

What one rank holds and sends is counted on the rank:

| part | what is counted |
|---|---|
| weights, gradients | the flat memory of the buckets, padding too |
| states | the optimizer's tensors that are no weights; master weights of half-precision ones |

The states of an offloaded optimizer are what passes through the device: its staging (memory/staging.py), without the
one number that counts its steps.
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
    """Calls of a verb along an axis, and their bytes, in one step."""

    axis: str
    verb: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class RankFacts:
    """`held`: bytes of weights, gradients and states between two steps; `peak_bytes`: the most memory that the rank
    ever had; `sent`: what it sends in a step."""

    rank: int
    stage: int
    held: dict[str, int]
    peak_bytes: int
    sent: tuple[SentCalls, ...]

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent in a step, by axis."""
        totals: dict[str, int] = {}
        for sent in self.sent:
            totals[sent.axis] = totals.get(sent.axis, 0) + sent.bytes
        return totals


@dataclass(frozen=True)
class MeasuredRun:
    """One run, read from its folder. `seconds`, `losses`, `phases`: of every step, in order; `phases` are rank 0's."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    ranks: tuple[RankFacts, ...]


def measure_run(config: Config, data: Path, folder: Path, steps: int) -> MeasuredRun:
    """Make `steps` steps of a layout from its first weights on, in a new folder, and read what they left.

    Raises LaunchError and Interrupted as the launcher does.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(run_text(config), encoding="utf-8")
    config = resolve(config, this_machine()).config
    ranks = config.ranks(name="compare")
    # Resolved before ranks start, by the launcher's own view of the machine, as train does.
    facts = run(run_on_rank, ranks, config=config, data=data, folder=folder.absolute(), steps=steps)
    lines = [parse_json(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
    return MeasuredRun(
        losses=tuple(float(line["loss"]) for line in lines),
        seconds=tuple(float(line["step_seconds"]) for line in lines),
        phases=tuple(line["phase_seconds"] for line in lines),
        ranks=tuple(RankFacts(**of | {"sent": tuple(SentCalls(**sent) for sent in of["sent"])}) for of in facts),
    )


def run_on_rank(rank: Rank, config: Config, data: Path, folder: Path, steps: int) -> dict[str, Any] | None:
    """One rank's run, and its facts; None where it was asked to stop."""
    mesh = rank.mesh
    parts = build(config, mesh, folder)
    train = config.data.open(config, data).train
    trainer = Trainer(parts, train)
    metrics = MetricsWriter(folder, 0) if mesh.rank == 0 else None
    for _ in range(steps):
        lines, stopping = trainer.turn(rank.stop)
        # A GPU's step is settled during the next one: the last has no record.
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
    """Bytes of weights, gradients and states on a rank that has made a step."""
    slots = parts.strategy.slots  # views of whole buckets, also where only a part of one is stepped
    frozen = [one.slot for one in parts.strategy.frozen]
    weights = storages(slot.parameter.detach() for slot in (*slots, *frozen))
    gradients = storages(slot.parameter.grad for slot in slots if slot.parameter.grad is not None)
    if isinstance(parts.optimizer.held, Offloaded):
        states = parts.optimizer.held.staging.num_bytes
    else:
        tensors = (tensor for index in range(len(slots)) for tensor in parts.optimizer.held.tensors(index).values())
        states = sum(size for address, size in storages(tensors).items() if address not in weights)
    return {"weights": sum(weights.values()), "gradients": sum(gradients.values()), "states": states}


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The storages behind some tensors, each once: bytes by address."""
    pieces = (tensor.untyped_storage() for tensor in tensors)
    return {piece.data_ptr(): piece.nbytes() for piece in pieces if piece.nbytes()}


def count_sent(parts: Parts, train: Samples, samples: int) -> tuple[SentCalls, ...]:
    """This rank's sends in one step: passes, the gradients' sums, the weights' publishing. Not the norm and the step
    report, which a plan does not count either (plan/predict.py).

    It makes these parts of a step once more, and leaves the gradients as they then are: call it last.
    """
    config, ledger = parts.config, parts.mesh.ledger
    before = {key: (entry.calls, entry.sent_bytes) for key, entry in ledger.traffic.items()}
    backward(parts, train.samples(samples, config.batch.global_), samples // config.batch.global_)
    parts.strategy.finish()
    publish(parts)
    sent = []
    for (axis, verb), entry in sorted(ledger.traffic.items()):
        calls, sent_bytes = before.get((axis, verb), (0, 0))
        # An axis that only the norm and the report use has sent nothing here.
        if entry.calls > calls:
            sent.append(SentCalls(axis, verb, entry.calls - calls, entry.sent_bytes - sent_bytes))
    return tuple(sent)
