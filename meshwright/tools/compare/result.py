"""A comparison's numbers: each layout measured and predicted, and their differences.

| quantity | measured | predicted |
|---|---|---|
| a step | median of the timed steps of all rounds; its spread: their quartiles | the simulated step |
| memory | the most that a rank ever had: its process, or a GPU's allocator | the fullest rank's parts, together |
| weights, gradients, states | the memory of the buckets and of the optimizer | by the same cuts |
| sent | the ledger of a step of a stage's first rank | the same, counted on meta tensors |

The first steps of a run are not timed: they make connections and states.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from meshwright.planner.plan.predict import Prediction
from meshwright.ranks.grid import PIPE
from meshwright.ranks.ledger import Ledger, Traffic
from meshwright.tools.verify.tolerance import tolerance_of
from meshwright.training.phases import PHASES

if TYPE_CHECKING:
    from meshwright.tools.compare.layouts import Contender
    from meshwright.training.measured_run import MeasuredRun, RankFacts

WARMUP_STEPS = 2


@dataclass(frozen=True)
class StageBytes:
    """A number of one stage's first rank: measured and, if it was, predicted."""

    stage: int
    measured: int
    predicted: int | None


def _largest(measured: Sequence[int], predicted: Sequence[int]) -> StageBytes:
    """(measured, predicted) of the stage with the largest measured value. `predicted`: empty without a prediction."""
    stage = max(range(len(measured)), key=measured.__getitem__)
    return StageBytes(stage, measured[stage], predicted[stage] if predicted else None)


@dataclass
class Measurement:
    """A layout. `runs`: one for each round that it finished. `failure`: why it has no more of them, else empty.

    `unpredicted`: why nothing was predicted of it, where nothing was. `threads`: CPU threads of each of its ranks.
    """

    contender: Contender
    runs: tuple[MeasuredRun, ...] = ()
    predicted: Prediction | None = None
    unpredicted: str = ""
    failure: str = ""
    threads: int = 1

    def __post_init__(self) -> None:
        self.name = self.contender.name
        self.timed = [seconds for run in self.runs for seconds in run.seconds[WARMUP_STEPS:]]
        """Seconds of every timed step."""
        self.peak_bytes = max((facts.peak_bytes for run in self.runs for facts in run.ranks), default=0)
        """The peak of the rank that had most."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.timed)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A half of the timed steps took between these; of one step, its seconds."""
        if len(self.timed) == 1:
            return self.timed[0], self.timed[0]
        low, _, high = statistics.quantiles(self.timed, n=4, method="inclusive")
        return low, high

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase, on rank 0."""
        lines = [phases for run in self.runs for phases in run.phases[WARMUP_STEPS:]]
        # Medians by phase, so that one slow phase of one step does not count; their sum is no step's time.
        return {phase: statistics.median(line[phase] for line in lines) for phase in PHASES}

    @property
    def stages(self) -> list[RankFacts]:
        """The first rank of each stage, of which a prediction speaks, in the last round."""
        grid = self.contender.config.grid
        origin = grid.coordinates(0)
        return [self.runs[-1].ranks[grid.rank(origin | {PIPE: stage})] for stage in range(grid.size(PIPE))]

    @property
    def error(self) -> float | None:
        """The predicted seconds' error, as a part of the measured ones; None without a prediction."""
        return self.predicted.seconds / self.seconds - 1 if self.predicted is not None else None

    @property
    def held(self) -> dict[str, StageBytes]:
        """Weights, gradients and states in bytes, of the stage that holds most of all together."""
        # One stage for all three parts: else the table would add memory of different ranks.
        stage = _largest([sum(facts.held.values()) for facts in self.stages], ()).stage
        memory = asdict(self.predicted.memory[stage]) if self.predicted is not None else {}
        return {part: StageBytes(stage, size, memory.get(part)) for part, size in self.stages[stage].held.items()}

    @property
    def sent(self) -> dict[str, StageBytes]:
        """Bytes of a step by axis, of the stage whose first rank sends most over it."""
        measured, predicted = [facts.sent_bytes for facts in self.stages], self.predicted_sent
        axes = dict.fromkeys(axis for sent in (*measured, *predicted) for axis in sent)
        return {
            axis: _largest([sent.get(axis, 0) for sent in measured], [sent.get(axis, 0) for sent in predicted])
            for axis in axes
        }

    @property
    def sent_in_all(self) -> StageBytes:
        """Bytes of a step over all axes, of the stage whose first rank sends most."""
        predicted = [sum(sent.values()) for sent in self.predicted_sent]
        return _largest([sum(facts.sent_bytes.values()) for facts in self.stages], predicted)

    @property
    def predicted_sent(self) -> list[dict[str, int]]:
        """Bytes of a step by axis, of each stage's first rank; empty where nothing was predicted."""
        sent = self.predicted.traffic if self.predicted is not None else ()
        return [Ledger(defaultdict(Traffic, traffic)).sent_bytes() for traffic in sent]


@dataclass
class Comparison:
    """`title`: the run's name. `steps` a round. `cluster`: whose facts predictions are made of, else empty, and
    `unpredicted` says why there are none. `device`: what it ran on, in words. `interrupted`: by what, else empty.
    """

    title: str
    rows: tuple[Measurement, ...]
    steps: int
    rounds: int
    device: str
    cluster: str = ""
    unpredicted: str = ""
    interrupted: str = ""

    def __post_init__(self) -> None:
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        self.effort = f"{rounds} of {self.steps} steps, of which the first {WARMUP_STEPS} are not timed"
        """The rounds and steps that were timed, in words."""
        self.measured = [row for row in self.rows if row.runs]
        """The layouts that have run, in the order in which they were given."""
        self.predicted = [row for row in self.measured if row.predicted is not None]
        """The layouts that have run and were predicted too."""
        errors = [abs(row.error) for row in self.measured if row.error is not None]
        self.mean_error = statistics.mean(errors) if errors else None
        """The mean of the predicted steps' absolute errors."""
        configs = [row.contender.config for row in self.measured]
        self.layout_free = bool(configs) and all(config.bits.layout_free for config in configs)
        """Whether losses must be equal to the bit in all layouts of one precision, masks of dropout included."""
        self.drops_out = not self.layout_free and any(config.model.dropout > 0 for config in configs)
        """Whether losses need not agree: layouts may draw other masks of dropout."""

    @property
    def fastest(self) -> Measurement:
        return min(self.measured, key=lambda row: row.seconds)

    @property
    def within_noise(self) -> list[Measurement]:
        """The layouts whose middle half of steps overlaps that of the fastest median; the latter is the first."""
        first = self.fastest
        low, high = first.quartiles
        near = [row for row in self.measured if row.quartiles[0] <= high and row.quartiles[1] >= low]
        return [first, *(row for row in near if row is not first)]

    @property
    def clear_fastest(self) -> Measurement | None:
        """The layout that is faster than all others by more than the noise."""
        return self.fastest if self.measured and len(self.within_noise) == 1 else None

    @property
    def predicted_fastest(self) -> Measurement | None:
        """The one that was predicted to be the fastest; None where not all were predicted, or there is but one."""
        # With unpredicted layouts there is no prediction of the fastest.
        if len(self.predicted) < len(self.measured) or len(self.measured) < 2:
            return None
        return min(self.predicted, key=lambda row: row.predicted.seconds if row.predicted else math.inf)

    def difference(self, row: Measurement) -> float:
        """The greatest relative difference of its losses to the first layout's first run, of all steps and rounds."""
        # Every round begins with the same weights and data, so all runs have this one's losses.
        reference = self.measured[0].runs[0].losses
        pairs = [pair for run in row.runs for pair in zip(run.losses, reference, strict=True)]
        differences = [abs(ours - theirs) / (abs(theirs) or 1.0) for ours, theirs in pairs]
        # max() would pass over a NaN by luck of the order.
        return max(math.inf if math.isnan(difference) else difference for difference in differences)

    def allowed(self, row: Measurement) -> float:
        """How much two orders of summation may differ in these precisions (verify/tolerance.py); 0 for equal bits."""
        if self.layout_free and row.contender.config.precision == self.measured[0].contender.config.precision:
            return 0.0
        return max(tolerance_of(one.contender.config).loss for one in (row, self.measured[0]))

    def agrees(self, row: Measurement) -> bool:
        return self.difference(row) <= self.allowed(row)
