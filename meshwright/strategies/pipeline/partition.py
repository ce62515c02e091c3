"""Which layers each position of the chain holds: contiguous runs, balanced or, from there on, as the virtual clock
finds them fastest.

The beginning (embeddings) weighs on the first position, the end (head and loss) on the last. Balance alone does not see
that a stage of several chunks is as slow as their sum, nor that a pipeline whose last stage is the bottleneck waits
for the first forward pass and the last backward pass of the others.
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
"""Simulated while a partition is looked for: a fifth of a second."""
MOST_ROUNDS = 2
"""Simulated microbatches for each position of the chain, at most."""
LATENCY = 0.1
"""A message, in forward passes of a position."""


def balanced(costs: Costs, num_stages: int) -> tuple[int, ...]:
    """Layers a stage, that the most expensive stage costs least; of equals, the most even, by squares.

    Only the first and the last stage may have none.
    """
    num_layers = len(costs.layers)
    # Sums from the beginning: a run of layers then costs one subtraction.
    sums = [0.0]
    for cost in costs.layers:
        sums.append(sums[-1] + cost)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """The stages from this one on, which share the layers from `start`: the most expensive, squares, layers."""
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
                break  # it costs more and more
            worst, squares, rest = best(stage + 1, stop)
            # Tuples compare in order: the bottleneck first, then evenness, then the layers themselves, so that the
            # answer is one.
            choice = max(cost, worst), cost**2 + squares, (stop - start, *rest)
            found = choice if found is None else min(found, choice)
        assert found is not None, f"{num_layers} layers are too few for {num_stages} stages"
        return found

    return best(0, 0)[2]


def fastest(costs: Costs, placement: ChunkPlacement, rule: ScheduleRule, num_microbatches: int) -> tuple[int, ...]:
    """Layers of each position, in the order of the chain. From the balanced cut on a layer moves from one position to
    another, as long as the clock has a step that is shorter; of equals the first, which is the more even.

    Where positions are so many that a step is expensive to simulate, the balanced cut stays.
    """
    simulated = min(num_microbatches, MOST_ROUNDS * placement.num_positions)
    # A budget of simulated tasks, not of seconds: every rank, and the planner, must come to the same partition.
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
            # Not for rounding's sake: partitions of equal time would use up what may be simulated.
            if took < seconds * (1 - 1e-9):
                best, seconds, improved = moved, took, True
                break
    return best


def long_step_seconds(
    costs: Costs, partition: tuple[int, ...], placement: ChunkPlacement, rule: ScheduleRule, num_microbatches: int
) -> float:
    """A step by the clock, of which MOST_ROUNDS microbatches for each position are simulated at most. Each one more
    takes as long as one of the last p did, and no less than the busiest stage works on it."""
    stages, rounds = placement.num_stages, MOST_ROUNDS * placement.num_positions
    if num_microbatches <= rounds:
        return step_seconds(costs, partition, placement, rule, num_microbatches)
    work = [sum(costs.layers[layer] for layer in run) for run in ranges_of(partition)]
    work[0] += costs.embedding
    work[-1] += costs.head
    # F, B and W of a layer take as much each.
    busiest = 3 * max(sum(work[position] for position in placement.positions[stage]) for stage in range(stages))
    # At the pace of the last p simulated microbatches: the busiest stage's work in its place was up to 30 % off for
    # 1F1B.
    seconds = step_seconds(costs, partition, placement, rule, rounds)
    before = step_seconds(costs, partition, placement, rule, rounds - stages)
    return seconds + (num_microbatches - rounds) * max(busiest, (seconds - before) / stages)


def _moves(partition: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Partitions with one layer elsewhere, neighbours first. Only the first and the last position may have none."""
    ends = (0, len(partition) - 1)
    places = [(a, b) for a in range(len(partition)) for b in range(len(partition)) if a != b]
    # Neighbours first: the search's budget goes to the smallest changes.
    for start, to in sorted(places, key=lambda pair: abs(pair[0] - pair[1])):
        if partition[start] > (0 if start in ends else 1):
            yield tuple(layers - (at == start) + (at == to) for at, layers in enumerate(partition))


def step_seconds(
    costs: Costs, partition: Sequence[int], placement: ChunkPlacement, rule: ScheduleRule, num_microbatches: int
) -> float:
    """A step by the clock. Of a layer F, B and W take as much each; a head computes its gradients in F, with the loss;
    embeddings have work in their weights' gradients alone."""
    runs = ranges_of(partition)
    layers = [sum(costs.layers[layer] for layer in run) for run in runs]
    last = placement.num_positions - 1

    def cost(stage: int, task: Task) -> float:
        position = placement.positions[stage][task.chunk]
        own = layers[position]
        if task.kind is TaskKind.FORWARD:
            return own + (3 * costs.head if position == last else 0.0)
        # Its look-ups are free and its input needs no gradient: all it costs is in the last task of a microbatch.
        embedding = 3 * costs.embedding if position == 0 and task.kind is rule.kinds[-1] else 0.0
        return embedding + (own if rule.splits else 2 * own)

    latency = LATENCY * costs.total / placement.num_positions
    return simulate(
        placement.num_stages, num_microbatches, rule, cost, lambda start, end, task: latency, placement=placement
    ).total_seconds


def ranges_of(partition: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, of their numbers."""
    starts = [sum(partition[:stage]) for stage in range(len(partition))]
    return tuple(range(start, start + count) for start, count in zip(starts, partition, strict=True))
