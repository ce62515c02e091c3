"""Planned bytes held against those of runs: sent and held ones exactly, activations within a tolerance."""

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
    """Whether activations and what is made beside them are within the tolerance. A schedule that acts on messages does
    its tasks in an order that hangs on when they come: then in the real order."""
    memory, schedule = predicted.memory[stage], predicted.config.layout.pipeline.schedule
    planned = memory.activations + memory.temporaries
    if len(predicted.memory) > 1 and schedule in ("axonn", "message-driven"):
        planned = replayed(planner, predicted.config, stage, real.tasks)
    if abs(planned - real.peak) > TOLERANCE * real.peak:
        yield f"activations: predicted {planned}, really {real.peak} ({planned / real.peak - 1:+.1%})"


def replayed(planner: Planner, config: Config, stage: int, tasks: Sequence[Task]) -> int:
    """The most bytes that are alive if a stage does these tasks, beside the messages that it waits for and the buckets
    of which it keeps slices."""
    run = TimedRun(planner.site, planner.buckets, config, planner.stages(config))
    plan, live, peak = run.stages[stage], 0, 0
    for task in tasks:
        cost = plan.chunks[task.chunk].cost(task.kind, place(task.microbatch, config.num_microbatches))
        live, peak = live + cost.kept_bytes, max(peak, live + cost.peak_bytes)
    whole = held_of(config, run.buckets[run.like[stage]]).passing
    return peak + run.awaited_bytes(stage) + plan.apart_bytes(config) + whole
