"""Comparisons of planned bytes with runs' bytes: sent and held bytes exactly, activations within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.config import Config
from meshwright.planner.plan.buckets import held_of
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.recorder import place
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.ranks.grid import PIPE
from meshwright.strategies.pipeline.task import Task
from tests.planner.plan.counted import CPU, counts
from tests.planner.plan.measured import Measured, measured
from tests.workers import run_ranks

TOLERANCE = 0.1


def check(configs: Sequence[Config]) -> None:
    layout = configs[0].layout
    grid = configs[0].grid
    ranks: list[list[Measured]] = run_ranks(measured, grid, configs, token_axes=layout.token_axes, transport="torch")
    planner = Planner(CPU)
    wrong: list[str] = []
    for index, config in enumerate(configs):
        predicted = planner.predict(config)
        for stage in range(layout.pipeline.size):
            real = ranks[grid.rank(dict.fromkeys(grid.names, 0) | {PIPE: stage})][index]
            lines = [*counts(predicted, stage, real), *held(planner, predicted, stage, real)]
            wrong += [f"{index} stage {stage}: {line}" for line in lines]
    assert not wrong, "\n".join(wrong)


def held(planner: Planner, predicted: Prediction, stage: int, real: Measured) -> Iterator[str]:
    """Yield a line if activations and temporaries exceed the tolerance. The task order of a schedule that acts on
    messages depends on arrivals: for such a schedule the real order is replayed."""
    memory, schedule = predicted.memory[stage], predicted.config.layout.pipeline.schedule
    planned = memory.activations + memory.temporaries
    if len(predicted.memory) > 1 and schedule in ("axonn", "message-driven"):
        planned = replayed(planner, predicted.config, stage, real.tasks)
    if abs(planned - real.peak) > TOLERANCE * real.peak:
        yield f"activations: predicted {planned}, really {real.peak} ({planned / real.peak - 1:+.1%})"


def replayed(planner: Planner, config: Config, stage: int, tasks: Sequence[Task]) -> int:
    """Return a stage's most live bytes under these tasks, with the awaited messages and with buckets held as slices."""
    run = TimedRun(planner.site, planner.buckets, config, planner.stages(config))
    plan, live, peak = run.stages[stage], 0, 0
    for task in tasks:
        cost = plan.chunks[task.chunk].cost(task.kind, place(task.microbatch, config.num_microbatches))
        live, peak = live + cost.kept_bytes, max(peak, live + cost.peak_bytes)
    whole = held_of(config, run.buckets[run.like[stage]]).passing
    return peak + run.awaited_bytes(stage) + plan.apart_bytes(config) + whole
