"""Numbers of a comparison: each layout measured and predicted, and the differences.

| quantity | measured | predicted |
|---|---|---|
| a step | median of the timed steps of all rounds; spread: the quartiles | the simulated step |
| memory | largest peak of any rank: the process' on a CPU, the allocator's on a GPU | all parts of the fullest rank |
| weights, gradients, states | the memory of the buckets and of the optimizer | by the same cuts |
| sent | the ledger of a step of a stage's first rank | the same, counted on meta tensors |

The first steps of a run, which open connections and allocate states, are not timed.
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
    """A number of bytes of one stage's first rank, measured and, if there is a prediction, predicted."""

    stage: int
    measured: int
    predicted: int | None


def _largest(measured: Sequence[int], predicted: Sequence[int]) -> StageBytes:
    """Return the bytes of the stage with the largest measured value. `predicted`: empty without a prediction."""
    stage = max(range(len(measured)), key=measured.__getitem__)
    return StageBytes(stage, measured[stage], predicted[stage] if predicted else None)


@dataclass
class Measurement:
    """A layout's measured runs and its prediction."""

    contender: Contender
    runs: tuple[MeasuredRun, ...] = ()
    """One for each round that the layout finished."""
    predicted: Prediction | None = None
    unpredicted: str = ""
    """The reason why nothing was predicted; else empty."""
    failure: str = ""
    """The error that ended a run of the layout; else empty."""
    threads: int = 1
    """CPU threads of each rank."""

    def __post_init__(self) -> None:
        self.name = self.contender.name
        self.timed = [seconds for run in self.runs for seconds in run.seconds[WARMUP_STEPS:]]
        """Seconds of every timed step."""
        self.peak_bytes = max((facts.peak_bytes for run in self.runs for facts in run.ranks), default=0)
        """The largest peak of any rank."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.timed)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile of the timed steps' seconds; of a single step, its seconds twice."""
        if len(self.timed) == 1:
            return self.timed[0], self.timed[0]
        low, _, high = statistics.quantiles(self.timed, n=4, method="inclusive")
        return low, high

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each phase, on rank 0."""
        lines = [phases for run in self.runs for phases in run.phases[WARMUP_STEPS:]]
        # Medians by phase, so that a single slow phase has no effect. The sum of medians is no step's time.
        return {phase: statistics.median(line[phase] for line in lines) for phase in PHASES}

    @property
    def stages(self) -> list[RankFacts]:
        """The first rank of each stage in the last round. Predictions are of these ranks."""
        grid = self.contender.config.grid
        origin = grid.coordinates(0)
        return [self.runs[-1].ranks[grid.rank(origin | {PIPE: stage})] for stage in range(grid.size(PIPE))]

    @property
    def error(self) -> float | None:
        """Relative error of the predicted seconds; None without a prediction."""
        return self.predicted.seconds / self.seconds - 1 if self.predicted is not None else None

    @property
    def held(self) -> dict[str, StageBytes]:
        """Bytes of weights, gradients and states of the stage with the largest sum."""
        # One stage for all three parts: else a table's row would mix memory of different ranks.
        stage = _largest([sum(facts.held.values()) for facts in self.stages], ()).stage
        memory = asdict(self.predicted.memory[stage]) if self.predicted is not None else {}
        return {
            category: StageBytes(stage, size, memory.get(category))
            for category, size in self.stages[stage].held.items()
        }

    @property
    def sent(self) -> dict[str, StageBytes]:
        """For each axis, bytes sent in a step; of the stage with the first rank that sends most over that axis."""
        measured, predicted = [facts.sent_bytes for facts in self.stages], self.predicted_sent
        axes = dict.fromkeys(axis for sent in (*measured, *predicted) for axis in sent)
        return {
            axis: _largest([sent.get(axis, 0) for sent in measured], [sent.get(axis, 0) for sent in predicted])
            for axis in axes
        }

    @property
    def sent_in_all(self) -> StageBytes:
        """Bytes sent in a step over all axes; of the stage with the first rank that sends most."""
        predicted = [sum(sent.values()) for sent in self.predicted_sent]
        return _largest([sum(facts.sent_bytes.values()) for facts in self.stages], predicted)

    @property
    def predicted_sent(self) -> list[dict[str, int]]:
        """For each stage's first rank, predicted bytes sent in a step by axis; empty without a prediction."""
        sent = self.predicted.traffic if self.predicted is not None else ()
        return [Ledger(defaultdict(Traffic, traffic)).sent_bytes() for traffic in sent]


@dataclass
class Comparison:
    """A finished or interrupted comparison."""

    title: str
    """The run's name."""
    rows: tuple[Measurement, ...]
    steps: int
    """Steps of each run."""
    rounds: int
    device: str
    """The device, in words."""
    cluster: str = ""
    """The name of the cluster that predictions are made for; else empty."""
    unpredicted: str = ""
    """The reason why there are no predictions; else empty."""
    interrupted: str = ""
    """The cause of an interruption, in words; else empty."""

    def __post_init__(self) -> None:
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        self.effort = f"{rounds} of {self.steps} steps, of which the first {WARMUP_STEPS} are not timed"
        """The rounds and steps that were timed, in words."""
        self.measured = [row for row in self.rows if row.runs]
        """The layouts that have run, in the given order."""
        self.predicted = [row for row in self.measured if row.predicted is not None]
        """The layouts that have run and were predicted too."""
        errors = [abs(row.error) for row in self.measured if row.error is not None]
        self.mean_error = statistics.mean(errors) if errors else None
        """The mean of the predicted steps' absolute errors."""
        configs = [row.contender.config for row in self.measured]
        self.layout_free = bool(configs) and all(config.bits.layout_free for config in configs)
        """Whether losses must be equal to the bit in all layouts of one precision, even with dropout."""
        self.drops_out = not self.layout_free and any(config.model.dropout > 0 for config in configs)
        """Whether losses need not agree, because layouts may draw different dropout masks."""

    @property
    def fastest(self) -> Measurement:
        return min(self.measured, key=lambda row: row.seconds)

    @property
    def within_noise(self) -> list[Measurement]:
        """The fastest layout by median; then the layouts with quartiles that overlap the fastest layout's."""
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
        """The layout with the smallest predicted time; None if some layout has no prediction, or only one has run."""
        if len(self.predicted) < len(self.measured) or len(self.measured) < 2:
            return None
        return min(self.predicted, key=lambda row: row.predicted.seconds if row.predicted else math.inf)

    def difference(self, row: Measurement) -> float:
        """Return the largest relative difference of losses to the first layout's first run, over steps and rounds."""
        # Every round begins with the same weights and data, so one run is the reference for all.
        reference = self.measured[0].runs[0].losses
        pairs = [pair for run in row.runs for pair in zip(run.losses, reference, strict=True)]
        differences = [abs(ours - theirs) / (abs(theirs) or 1.0) for ours, theirs in pairs]
        # max() with a NaN depends on the order.
        return max(math.inf if math.isnan(difference) else difference for difference in differences)

    def allowed(self, row: Measurement) -> float:
        """Return the difference allowed between two orders of summation (verify/tolerance.py); 0 for equal bits."""
        if self.layout_free and row.contender.config.precision == self.measured[0].contender.config.precision:
            return 0.0
        return max(tolerance_of(measurement.contender.config).loss for measurement in (row, self.measured[0]))

    def agrees(self, row: Measurement) -> bool:
        return self.difference(row) <= self.allowed(row)
