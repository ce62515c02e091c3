"""Who runs which branch: branches of given costs dealt over sub-grids (SUPER, IPDPS 2021: D&SP).

Greedy, the dearest branch first to whom has the least to do (Graham, 1969: at most 4/3 of the best deal's time).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from meshwright.errors import ConfigError

Deal = tuple[tuple[int, ...], ...]
"""By sub-grid: the numbers of its branches, in order."""


def deal(costs: Sequence[float], num_subgrids: int) -> Deal:
    """Every branch to one sub-grid, and to each sub-grid at least one branch.

    `costs`: of the branches, in any unit. Branches of the same cost lie side by side: equal ones are dealt in runs,
    0 1 | 2 3. Raises ConfigError for fewer branches than sub-grids, and for costs that are no numbers from 0 up.
    """
    if len(costs) < num_subgrids:
        rule = f"branches are fewer than the {num_subgrids} sub-grids they are dealt over"
        raise ConfigError.of("branches", len(costs), rule, f"{num_subgrids} or more")
    for cost in costs:
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigError.of("costs", cost, "is not the cost of a branch", "numbers from 0 up")
    hands: list[list[int]] = [[] for _ in range(num_subgrids)]
    loads = [0.0] * num_subgrids
    for cost in sorted(set(costs), reverse=True):
        alike = [branch for branch, its_cost in enumerate(costs) if its_cost == cost]
        shares = _shares(loads, [len(hand) for hand in hands], cost, len(alike))
        left = iter(alike)
        for subgrid, share in enumerate(shares):
            hands[subgrid] += islice(left, share)
            loads[subgrid] += share * cost
    return tuple(tuple(sorted(hand)) for hand in hands)


def _shares(loads: Sequence[float], held: Sequence[int], cost: float, count: int) -> list[int]:
    """How many of `count` branches of one cost each sub-grid gets, one after another to the least loaded."""
    shares = [0] * len(loads)
    for _ in range(count):
        *_, least = min(
            (load + share * cost, have + share, subgrid)
            for subgrid, (load, have, share) in enumerate(zip(loads, held, shares, strict=True))
        )
        shares[least] += 1
    return shares
