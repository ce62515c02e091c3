"""What was measured and what was predicted of each layout, and how far they are apart: plain numbers.

| quantity | measured | predicted |
|---|---|---|
| a step | median of the timed steps of all rounds; its spread: their quartiles | the simulated step |
| memory | the most that a rank ever had: its process, or a GPU's allocator | the fullest rank's parts, together |
| weights, gradients, states | the memory of the buckets and of the optimizer | by the same cuts |
| sent | the ledger of a step of a stage's first rank | the same, counted without numbers |

The first steps of a run are not timed: they make connections and states.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from meshwright.tools.compare.layouts import Entry
from meshwright.tools.compare.run import RankFacts, Run, first_ranks
from meshwright.tools.verify.compare import tolerance_of
from meshwright.train.phases import PHASES

WARMUP_STEPS = 2


@dataclass(frozen=True)
class StagePrediction:
    """Of the first rank of a stage. `memory`: bytes by part; `sent`: bytes a step by axis."""

    memory: Mapping[str, int]
    sent: Mapping[str, int]


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step and of its phases; of each stage its first rank."""

    seconds: float
    phases: Mapping[str, float]
    stages: tuple[StagePrediction, ...]

    @property
    def peak_bytes(self) -> int:
        return max(sum(stage.memory.values()) for stage in self.stages)


@dataclass(frozen=True)
class Row:
    """A layout. `runs`: of each round that it finished. `failure`: why it has no more of them, else empty.

    `unpredicted`: why nothing was predicted of it, where nothing was. `threads`: CPU threads of each of its ranks.
    """

    entry: Entry
    runs: tuple[Run, ...] = ()
    predicted: Predicted | None = None
    unpredicted: str = ""
    failure: str = ""
    threads: int = 1

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def timed(self) -> list[float]:
        """Seconds of every timed step."""
        return [seconds for run in self.runs for seconds in run.seconds[WARMUP_STEPS:]]

    @property
    def seconds(self) -> float:
        return statistics.median(self.timed)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A half of the timed steps took between these."""
        low, _, high = statistics.quantiles(self.timed, n=4, method="inclusive")
        return low, high

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase, on rank 0."""
        lines = [phases for run in self.runs for phases in run.phases[WARMUP_STEPS:]]
        return {phase: statistics.median(line[phase] for line in lines) for phase in PHASES}

    @property
    def peak_bytes(self) -> int:
        """Of the rank that had most."""
        return max(facts.peak_bytes for run in self.runs for facts in run.ranks)

    @property
    def stages(self) -> list[RankFacts]:
        """The first rank of each stage, in the last round."""
        return [self.runs[-1].ranks[rank] for rank in first_ranks(self.entry.config)]

    @property
    def error(self) -> float | None:
        """Of the predicted seconds, as a part of the measured ones; None without a prediction."""
        return self.predicted.seconds / self.seconds - 1 if self.predicted is not None else None


@dataclass(frozen=True)
class Pair:
    """A number of one stage, measured and, if it was, predicted."""

    stage: int
    measured: int
    predicted: int | None


def held_pairs(row: Row) -> dict[str, Pair]:
    """Weights, gradients and states in bytes, of the stage that holds most of all together."""
    held = [asdict(stage.held) for stage in row.stages]
    stage = _most([sum(parts.values()) for parts in held])
    foreseen = row.predicted.stages[stage].memory if row.predicted is not None else {}
    return {part: Pair(stage, size, foreseen.get(part)) for part, size in held[stage].items()}


def sent_pairs(row: Row) -> dict[str, Pair]:
    """Bytes of a step by axis, of the stage whose first rank sends most over it."""
    stages = [stage.sent_bytes for stage in row.stages]
    foreseen = [stage.sent for stage in row.predicted.stages] if row.predicted is not None else []
    axes = dict.fromkeys(axis for sent in (*stages, *foreseen) for axis in sent)
    pairs = {}
    for axis in axes:
        stage = _most([sent.get(axis, 0) for sent in stages])
        pairs[axis] = Pair(stage, stages[stage].get(axis, 0), foreseen[stage].get(axis, 0) if foreseen else None)
    return pairs


def sent_by_one(row: Row) -> Pair:
    """Bytes of a step over all axes, of the stage whose first rank sends most."""
    totals = [sum(stage.sent_bytes.values()) for stage in row.stages]
    stage = _most(totals)
    return Pair(stage, totals[stage], sum(row.predicted.stages[stage].sent.values()) if row.predicted else None)


def _most(numbers: Sequence[int]) -> int:
    """The place of the greatest, the first of equals."""
    return max(range(len(numbers)), key=lambda place: numbers[place])


@dataclass(frozen=True)
class Comparison:
    """`title`: the run's name. `steps` a round. `cluster`: whose facts predictions are made of, else empty, and
    `unpredicted` says why there are none. `device`: what it ran on, in words. `interrupted`: by what, else empty.
    """

    title: str
    rows: tuple[Row, ...]
    steps: int
    rounds: int
    device: str
    cluster: str = ""
    unpredicted: str = ""
    interrupted: str = ""

    @property
    def effort(self) -> str:
        """What was timed, in words."""
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"{rounds} of {self.steps} steps, of which the first {WARMUP_STEPS} are not timed"

    @property
    def measured(self) -> list[Row]:
        """The layouts that have run, in the order in which they were given."""
        return [row for row in self.rows if row.runs]

    @property
    def predicted(self) -> list[Row]:
        """Those of them that were predicted too."""
        return [row for row in self.measured if row.predicted is not None]

    @property
    def fastest(self) -> Row:
        return min(self.measured, key=lambda row: row.seconds)

    @property
    def foreseen_fastest(self) -> Row | None:
        """The one that was predicted to be the fastest; None where not all were predicted, or there is but one."""
        if len(self.predicted) < len(self.measured) or len(self.measured) < 2:
            return None
        return min(self.predicted, key=_seconds)

    @property
    def mean_error(self) -> float | None:
        """The mean of the predicted steps' absolute errors."""
        errors = [abs(row.error) for row in self.measured if row.error is not None]
        return statistics.mean(errors) if errors else None

    @property
    def drops_out(self) -> bool:
        """Whether the losses need not agree: no two layouts share the masks of dropout."""
        return any(row.entry.config.model.dropout > 0 for row in self.measured)

    def difference(self, row: Row) -> float:
        """The greatest relative difference of its losses to the first layout's first run, of all steps and rounds."""
        reference = self.measured[0].runs[0].losses
        return max(
            _difference(ours, theirs) for run in row.runs for ours, theirs in zip(run.losses, reference, strict=True)
        )

    def allowed(self, row: Row) -> float:
        """How much two orders of summation may differ in these precisions (verify/compare.py)."""
        return max(tolerance_of(one.entry.config).loss for one in (row, self.measured[0]))

    def agrees(self, row: Row) -> bool:
        return self.difference(row) <= self.allowed(row)


def _seconds(row: Row) -> float:
    assert row.predicted is not None
    return row.predicted.seconds


def _difference(ours: float, theirs: float) -> float:
    """Relative; infinite where one is no number."""
    difference = abs(ours - theirs) / abs(theirs) if theirs else abs(ours - theirs)
    return difference if not math.isnan(difference) else math.inf


def all_losses(rows: Sequence[Row]) -> dict[str, tuple[float, ...]]:
    """Of each layout's first run, by name."""
    return {row.name: row.runs[0].losses for row in rows}
