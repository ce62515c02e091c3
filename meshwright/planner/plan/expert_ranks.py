"""The ranks over which another program deals experts, and the number of these ranks that a token is sent to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

from meshwright.ranks.grid import EXPERT, Grid

Dispatcher = Literal["alltoall", "deepep", "hybridep", "allgather"]
"""How a program sends rows to experts on other ranks (planner/plan/dispatched.py)."""

SENT_ONCE: tuple[Dispatcher, ...] = ("deepep", "hybridep")
"""Kernels that send a token once to each rank that has an expert of the token."""


class Choice(NamedTuple):
    """How a router chooses: `chosen` of `experts`, of `groups_chosen` of `groups` groups."""

    experts: int
    chosen: int
    groups: int = 1
    groups_chosen: int = 1


def units_of(choice: Choice, units: int) -> float:
    """The mean number of units (ranks, nodes) with an expert of a token, if experts are dealt out evenly in order.

    A token takes any groups, and any experts of these groups, equally often. A unit that has u of a token's m
    candidates has none of the token's k experts with the probability (m - u choose k) / (m choose k).
    """
    each, size = choice.experts // units, choice.experts // choice.groups
    candidates = choice.groups_chosen * size
    every, total = math.comb(candidates, choice.chosen), 0.0
    chosen = list(combinations(range(choice.groups), choice.groups_chosen))
    for first in range(0, choice.experts, each):
        common = [max(0, min(first + each, (g + 1) * size) - max(first, g * size)) for g in range(choice.groups)]
        owns = Counter(sum(common[group] for group in groups) for groups in chosen)
        total += sum(times * (1 - math.comb(candidates - held, choice.chosen) / every) for held, times in owns.items())
    return total / len(chosen)


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of another program over which experts are dealt, and how rows reach these.

    Attributes:
        dispatcher: How rows are sent.
        tensor: Ranks that cut one expert's matrices; 0: all of the tensor axis.
        context: Whether ranks that hold parts of one sequence have different experts.
    """

    dispatcher: Dispatcher
    tensor: int = 0
    context: bool = False

    def axes(self, grid: Grid) -> tuple[str, ...]:
        """The axes of the ranks, in the grid's order."""
        chosen = (EXPERT, "tensor", *(("context",) if self.context else ()))
        return tuple(name for name in grid.names if name in chosen and grid.size(name) > 1)

    def parts(self, grid: Grid) -> int:
        """The number of ranks that cut one expert's matrices."""
        return self.tensor or (grid.size("tensor") if "tensor" in grid.names else 1)
