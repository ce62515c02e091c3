"""Partitions of the layers over the positions of the chain: contiguous, balanced, then improved by simulation.

The embeddings add cost to the first position, the head and the loss to the last. Balance alone ignores that the chunks
of one stage add up. Balance also ignores that a last stage, if slowest, waits while the first forward pass and the last
backward pass run on the other stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from meshwright.compute.model import Costs
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import ScheduleRule
from meshwright.strategies.pipeline.task import Task, TaskKind

SEARCHED_TASKS = 6_000
"""Tasks simulated in the search for a partition: a fifth of a second."""
MOST_ROUNDS = 2
"""Largest number of simulated microbatches for each position of the chain."""
LATENCY = 0.1
"""Duration of a message, in forward passes of a position."""


def balanced(costs: Costs, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, with the smallest cost of the most expensive stage.

    Of equal partitions the most even one (sum of squares). Only the first and the last stage may have no layer.
    """
    num_layers = len(costs.layers)
    # Prefix sums: the cost of consecutive layers is one subtraction.
    sums = [0.0]
    for cost in costs.layers:
        sums.append(sums[-1] + cost)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the largest cost, the sum of squared costs, and the layers of stages `stage`, ..., for layers from
        `start` on."""
        first = costs.embedding if stage == 0 else 0.0
        if stage == num_stages - 1:
            cost = first + sums[num_layers] - sums[start] + costs.head
            return cost, cost**2, (num_layers - start,)
        least = 0 if stage == 0 else 1
        found: tuple[float, float, tuple[int, ...]] | None = None
        between = max(0, num_stages - stage - 2)  # stages that need a layer each
        for stop in range(start + least, num_layers + 1 - between):
            cost = first + sums[stop] - sums[start]
            if found is not None and cost > found[0]:
                break  # the cost only grows from here
            worst, squares, rest = best(stage + 1, stop)
            # Tuples compare in order: the bottleneck, then evenness, then the layers, so that the answer is unique.
            choice = max(cost, worst), cost**2 + squares, (stop - start, *rest)
            found = choice if found is None else min(found, choice)
        assert found is not None, f"{num_layers} layers are too few for {num_stages} stages"
        return found

    return best(0, 0)[2]


def fastest(costs: Costs, placement: ChunkPlacement, rule: ScheduleRule, num_microbatches: int) -> tuple[int, ...]:
    """Return the number of layers of each position, in the order of the chain, by local search in simulated steps.

    The search begins at the balanced partition and moves one layer at a time, as long as the simulated step becomes
    shorter. Of equal steps the first found is kept. If one simulation would exceed `SEARCHED_TASKS`, the balanced
    partition is returned.
    """
    simulated = min(num_microbatches, MOST_ROUNDS * placement.num_positions)
    # A budget of tasks, not of seconds: all ranks, and the planner, must find the same partition.
    left = SEARCHED_TASKS // (len(rule.kinds) * simulated * placement.num_positions)
    best = balanced(costs, placement.num_positions)
    if left == 0:
        return best
    seconds = long_step_seconds(costs, best, placement, rule, num_microbatches)
    improved = True
    while improved and left > 0:
        improved = False
        for moved in _moves(best):
            if left == 0:
                break
            left -= 1
            took = long_step_seconds(costs, moved, placement, rule, num_microbatches)
            # A tolerance for rounding: moves between partitions of equal time would use up the budget.
            if took < seconds * (1 - 1e-9):
                best, seconds, improved = moved, took, True
                break
    return best


def long_step_seconds(
    costs: Costs, partition: tuple[int, ...], placement: ChunkPlacement, rule: ScheduleRule, num_microbatches: int
) -> float:
    """Return the seconds of a step, simulating at most MOST_ROUNDS microbatches for each position.

    Each further microbatch takes the mean time of the last p simulated ones, but at least the time of the busiest
    stage.
    """
    stages, rounds = placement.num_stages, MOST_ROUNDS * placement.num_positions
    if num_microbatches <= rounds:
        return step_seconds(costs, partition, placement, rule, num_microbatches)
    work = [sum(costs.layers[layer] for layer in run) for run in ranges_of(partition)]
    work[0] += costs.embedding
    work[-1] += costs.head
    # F, B and W of a layer take equal time.
    busiest = 3 * max(sum(work[position] for position in placement.positions[stage]) for stage in range(stages))
    # The pace of the last p simulated microbatches: with the busiest stage's time instead, 1F1B was up to 30 % off.
    seconds = step_seconds(costs, partition, placement, rule, rounds)
    before = step_seconds(costs, partition, placement, rule, rounds - stages)
    return seconds + (num_microbatches - rounds) * max(busiest, (seconds - before) / stages)


def _moves(partition: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield partitions with one layer moved, to neighbours first. Only the first and the last position may have no
    layer."""
    ends = (0, len(partition) - 1)
    places = [(a, b) for a in range(len(partition)) for b in range(len(partition)) if a != b]
    # Neighbours first: the budget is spent on the smallest changes.
    for start, to in sorted(places, key=lambda pair: abs(pair[0] - pair[1])):
        if partition[start] > (0 if start in ends else 1):
            yield tuple(layers - (at == start) + (at == to) for at, layers in enumerate(partition))


def step_seconds(
    costs: Costs, partition: Sequence[int], placement: ChunkPlacement, rule: ScheduleRule, num_microbatches: int
) -> float:
    """Return the simulated seconds of a step.

    F, B and W of a layer take equal time. The head computes its gradients in F, with the loss. Embeddings only have
    work in their weights' gradients.
    """
    runs = ranges_of(partition)
    layers = [sum(costs.layers[layer] for layer in run) for run in runs]
    last = placement.num_positions - 1

    def cost(stage: int, task: Task) -> float:
        position = placement.positions[stage][task.chunk]
        seconds = layers[position]
        if task.kind is TaskKind.FORWARD:
            return seconds + (3 * costs.head if position == last else 0.0)
        # Look-ups are free and the input needs no gradient: the table's gradient is computed in a microbatch's last
        # task.
        embedding = 3 * costs.embedding if position == 0 and task.kind is rule.kinds[-1] else 0.0
        return embedding + (seconds if rule.splits else 2 * seconds)

    latency = LATENCY * costs.total / placement.num_positions
    return simulate(
        placement.num_stages, num_microbatches, rule, cost, lambda start, end, task: latency, placement=placement
    ).total_seconds


def ranges_of(partition: Sequence[int]) -> tuple[range, ...]:
    """Return the layer numbers of each stage."""
    starts = [sum(partition[:stage]) for stage in range(len(partition))]
    return tuple(range(start, start + count) for start, count in zip(starts, partition, strict=True))
