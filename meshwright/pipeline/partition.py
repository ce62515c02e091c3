"""Which layers a stage holds: contiguous runs whose most expensive is as cheap as can be.

The beginning (embeddings) weighs on the first stage, the end (head and loss) on the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from meshwright.model import Costs


def balanced(costs: Costs, num_stages: int) -> tuple[int, ...]:
    """Layers a stage, that the most expensive stage costs least; of equals, the most even, by squares.

    Only the first and the last stage may have none.
    """
    num_layers = len(costs.layers)
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
        choices = []
        for stop in range(start + least, num_layers + 1):
            if num_layers - stop >= num_stages - stage - 2:  # the stages between need a layer each
                cost = first + sums[stop] - sums[start]
                worst, squares, rest = best(stage + 1, stop)
                choices.append((max(cost, worst), cost**2 + squares, (stop - start, *rest)))
        return min(choices)

    return best(0, 0)[2]


def ranges_of(partition: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, of their numbers."""
    starts = [sum(partition[:stage]) for stage in range(len(partition))]
    return tuple(range(start, start + count) for start, count in zip(starts, partition, strict=True))
