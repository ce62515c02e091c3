"""What the virtual clock says of a planned pipeline, under its own schedule and under the others.

A task takes its part of its stage's counted work, which shares layers out (stage_costs.py): F a third, B the
rest where it is whole, a third each where B and W are split. Messages take no time, and recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.model import Chunk, Costs
from meshwright.pipeline.clock import simulate
from meshwright.pipeline.schedule import Rule
from meshwright.pipeline.span import Timeline
from meshwright.pipeline.task import Kind, Task
from meshwright.registry import entries
from meshwright.stage_costs import counted_costs
from meshwright.tools.plan.counted_step import Plan

UNIT = "forward passes of a microbatch"
"""The clock's second: a microbatch's forward pass through the whole model."""


@dataclass(frozen=True)
class Forecast:
    """`shares`: of each stage in the work; they add up to 1. `limits`: the most microbatches that it holds.

    `timelines`: a step by schedule, in UNITs; `schedule`: the run's own, with these limits, where the others have those
    that they come with.
    """

    schedule: str
    shares: tuple[float, ...]
    limits: tuple[int, ...]
    timelines: dict[str, Timeline]

    @property
    def chosen(self) -> Timeline:
        """The run's own."""
        return self.timelines[self.schedule]


def forecast(plans: Sequence[Plan]) -> Forecast:
    """Of one rank's plan for each stage."""
    config = plans[0].parts.config
    name, num_stages, num_microbatches = config.layout.pipeline.schedule, len(plans), config.num_microbatches
    shares = _shares(plans[0])
    rules = [plan.parts.pipeline.rule for plan in plans]
    limits = tuple(rule.limit(stage, num_stages, num_microbatches) for stage, rule in enumerate(rules))

    def own(stage: int, num_stages: int, num_microbatches: int) -> int:
        return limits[stage]

    def run(rule: Rule) -> Timeline:
        backward = 1 if rule.splits else 2

        def costs(stage: int, task: Task) -> float:
            return shares[stage] * (backward if task.kind is Kind.BACKWARD else 1)

        return simulate(num_stages, num_microbatches, rule, costs, lambda start, end, message: 0.0)

    schedules = entries("schedules")
    others = {other: run(rule) for other, rule in schedules.items() if other != name}
    return Forecast(name, shares, limits, {name: run(replace(schedules[name], limit=own))} | others)


def _shares(plan: Plan) -> tuple[float, ...]:
    """What part of the work each stage does."""
    parts = plan.parts
    costs = counted_costs(parts.config)
    return tuple(_cost(costs, chunk) / costs.total for chunk in parts.stages.chunks)


def _cost(costs: Costs, chunk: Chunk) -> float:
    ends = costs.embedding * chunk.first + costs.head * chunk.last
    return ends + sum(costs.layers[layer] for layer in chunk.layers)
