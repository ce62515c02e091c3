"""How much faster g ranks could be than one, if sending took no time (Amdahl, 1967; SUPER, IPDPS 2021, section III).

C: work outside of the branches that are dealt; D_r: the most that a sub-grid gets of region r, dealt by cost
(subgraph/deal.py). Regions come one after another, so that each ends with its slowest sub-grid.

| layout                                                        | bound                         |
|---------------------------------------------------------------|-------------------------------|
| D&SP: the g ranks share the rows of common layers             | total / (C/g + sum of D_r)    |
| D&SP-cSub, pure sub-graph parallelism: one computes these     | total / (C + sum of D_r)      |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.subgraph.deal import deal

Dealt = tuple[Sequence[float], int]
"""The costs of a region's branches, and how often the region is there."""


@dataclass(frozen=True)
class Bound:
    """Against one rank. `all_ranks`: common layers on all (D&SP); `one`: on one sub-grid (D&SP-cSub)."""

    all_ranks: float
    one: float


def bound(total: float, regions: Sequence[Dealt], num_subgrids: int) -> Bound:
    """Of a model of `total` cost whose `regions`, which do not overlap, are dealt over sub-grids of one rank each."""
    common = total - sum(times * sum(costs) for costs, times in regions)
    slowest = sum(times * most_loaded(costs, num_subgrids) for costs, times in regions)
    return Bound(total / (common / num_subgrids + slowest), total / (common + slowest))


def most_loaded(costs: Sequence[float], num_subgrids: int) -> float:
    """What the sub-grid with the most to do has to do; with fewer branches than sub-grids some have nothing."""
    hands = deal(costs, min(num_subgrids, len(costs)))
    return max(sum(costs[branch] for branch in hand) for hand in hands)
