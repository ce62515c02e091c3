"""One run of one layout: a job of its own ranks, through the launcher, with the steps that `meshwright train` makes.

Left in its folder: metrics.jsonl, with a line a step as train writes it; rank-R.json, what each rank held and sent.
No checkpoint is written and nothing is validated in between, so that a step is a step.

What one rank holds and sends, counted on the rank: inside of a worker.

| part | what is counted |
|---|---|
| weights, gradients | the flat memory of the buckets, padding too |
| states | the optimizer's tensors that are no weights; master weights of half-precision ones |

Of an offloaded optimizer the states are what passes through the device: its staging (memory/staging.py), without the
one number that counts its steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.build import Parts, build
from meshwright.config import Config, dump_config
from meshwright.environment import Environment
from meshwright.launch import Job, StopRequest
from meshwright.memory.offload import Offloaded
from meshwright.model import Batch, Samples, to_device
from meshwright.ranks.grid import PIPE, Grid
from meshwright.resolve import resolve, this_machine
from meshwright.train.job import open_layout, run_ranks
from meshwright.train.loop import Trainer
from meshwright.train.metrics import MetricsWriter, peak_memory_bytes
from meshwright.train.step import publish, replica_backward

COUNT_BYTES = 4
"""Of the step's number, which torch's AdamW wants as a tensor."""


@dataclass(frozen=True)
class Held:
    """Bytes on one rank between two steps."""

    weights: int
    gradients: int
    states: int


def held_by(parts: Parts) -> Held:
    """What a rank holds that has made a step."""
    slots = parts.strategy.slots  # views of whole buckets, also where only a part of one is stepped
    weights = storages(slot.parameter.detach() for slot in slots)
    gradients = storages(slot.parameter.grad for slot in slots if slot.parameter.grad is not None)
    if isinstance(parts.optimizer.held, Offloaded):
        states = parts.optimizer.held.tier.live_bytes - COUNT_BYTES
    else:
        kept = (tensor for index in range(len(slots)) for tensor in parts.optimizer.states(index).values())
        states = sum(size for address, size in storages(kept).items() if address not in weights)
    return Held(sum(weights.values()), sum(gradients.values()), states)


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory behind some tensors, each piece once: bytes by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def count_sent(parts: Parts, train: Samples, samples: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, bytes) that this rank sends in one step, by axis and verb: passes, the gradients' sums, the weights'
    publishing. Not the norm and the step report, which a plan does not count either (plan/predict.py).

    It makes these parts of a step, with the labels' plain sum as loss, and leaves the gradients as they then are: call
    it last.
    """
    config, ledger = parts.config, parts.mesh.ledger

    def load(first: int, count: int) -> Batch:
        return to_device(train.samples(samples + first, count), parts.mesh.device)

    batch = parts.strategy.share(load, config.replica_batch)
    before = {key: (entry.calls, entry.sent_bytes) for key, entry in ledger.traffic.items()}
    replica_backward(parts, batch, [1 for _ in parts.model.labels], samples)
    parts.strategy.finish()
    publish(parts)
    sent: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for key, entry in ledger.traffic.items():
        calls, sent_bytes = before.get(key, (0, 0))
        if entry.calls > calls:
            sent[key] = (entry.calls - calls, entry.sent_bytes - sent_bytes)
    return dict(sent)


WORKER = "meshwright.tools.compare.run:worker"

Sent = dict[tuple[str, str], tuple[int, int]]
"""(calls, bytes) of a step, by axis and verb."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank held between two steps, the most memory that it ever had, and what it sends in a step."""

    rank: int
    stage: int
    held: Held
    peak_bytes: int
    sent: Sent

    @property
    def sent_bytes(self) -> dict[str, int]:
        """By axis."""
        totals: dict[str, int] = {}
        for (axis, _), (_, sent_bytes) in self.sent.items():
            totals[axis] = totals.get(axis, 0) + sent_bytes
        return totals


@dataclass(frozen=True)
class Run:
    """What one run left behind. `seconds`, `losses`, `phases`: of every step, in order; `phases` are rank 0's."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    ranks: tuple[RankFacts, ...]


def here(config: Config) -> Config:
    """The config as it is run: all ranks on this machine, and none of them started again."""
    layout = config.layout.model_copy(update={"ranks_per_node": "auto"})
    return config.model_copy(update={"layout": layout, "restarts": 0})


def run(config: Config, data: Path, folder: Path, steps: int) -> Run:
    """Make `steps` steps of a layout from its first weights on, in a new folder, and read what they left.

    Raises LaunchError and Interrupted as the launcher does.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    config = resolve(config, this_machine()).config
    arguments = {
        "config": config.model_dump(mode="json", by_alias=True), "out": str(folder.absolute()), "data": str(data),
        "steps": steps,
    }  # fmt: skip
    run_ranks(config, Job(WORKER, arguments))
    return read_run(folder, config.layout.world_size)


def worker(
    environment: Environment,
    stop: StopRequest,
    *,
    config: dict[str, Any],
    out: str,
    data: str,
    steps: int,
) -> None:
    """One rank."""
    settings, folder = Config.model_validate(config), Path(out)
    with open_layout(settings, environment, job="compare") as mesh:
        parts = build(settings, mesh, folder)
        train = settings.data.open(settings, Path(data)).train
        trainer = Trainer(parts, train)
        metrics = MetricsWriter(folder, 0, tensorboard=False) if mesh.rank == 0 else None
        for _ in range(steps):
            line, stopping = trainer.turn(stop)
            if metrics is not None:
                metrics.write(line)
            if stopping:
                return
        if metrics is not None:
            metrics.close()
        held, peak_bytes = held_by(parts), peak_memory_bytes(mesh.device)
        sent = count_sent(parts, train, trainer.samples)
        facts = RankFacts(mesh.rank, mesh.index(PIPE), held, peak_bytes, sent)
        (folder / f"rank-{mesh.rank}.json").write_text(json.dumps(_as_json(facts)))


def _as_json(facts: RankFacts) -> dict[str, Any]:
    return asdict(facts) | {"sent": [[*key, *counts] for key, counts in sorted(facts.sent.items())]}


def _rank_facts(text: str) -> RankFacts:
    tree = json.loads(text)
    sent = {(axis, verb): (calls, sent_bytes) for axis, verb, calls, sent_bytes in tree["sent"]}
    return RankFacts(tree["rank"], tree["stage"], Held(**tree["held"]), tree["peak_bytes"], sent)


def read_run(folder: Path, num_ranks: int) -> Run:
    """What a run that came to its end has left in its folder."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Run(
        losses=tuple(float(line["loss"]) for line in lines),
        seconds=tuple(float(line["step_seconds"]) for line in lines),
        phases=tuple(line["phase_seconds"] for line in lines),
        ranks=tuple(_rank_facts((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)),
    )


def first_ranks(config: Config) -> Sequence[int]:
    """The first rank of each stage: of whom a prediction speaks."""
    grid = Grid(config.layout.axes)
    origin = grid.coordinates(0)
    return [grid.rank(origin | {PIPE: stage}) for stage in range(grid.size(PIPE))]
