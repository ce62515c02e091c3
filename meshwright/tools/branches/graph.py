"""A model as a graph of operators, each with its flops. The module needs no torch: graphs can be written by hand.

Operators on activations are in the graph; operators on weights alone, and masks, count in `beside_flops`. Operator 0 is
the batch. Each other operator comes after those whose results it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

BATCH = 0
"""The number of the operator that stands for the model's input."""


class OperatorKind(Enum):
    """How an operator treats branches, which lie side by side along the channels."""

    LINEAR = "linear"
    """An activation times a weight: each output channel depends on all input channels; it can be cut along either."""
    HEADS = "heads"
    """Attention: its heads are branches by definition."""
    GROUPS = "groups"
    """A grouped convolution: so are its groups."""
    LOCAL = "local"
    """Element by element, channel by channel, or a view: each branch passes through alone."""
    OTHER = "other"
    """Everything else: branches end here."""


@dataclass(frozen=True)
class Operator:
    """`path`: the module that it belongs to. `inputs`: the numbers of the operators whose results it reads.

    `width`: of LINEAR its input channels; of HEADS, GROUPS and a norm over groups of channels (LOCAL) their number; 0:
    any number of branches may pass.
    """

    name: str
    path: str
    inputs: tuple[int, ...]
    flops: int
    kind: OperatorKind
    width: int = 0


@dataclass(frozen=True)
class OperatorGraph:
    """A model's operators. `beside_flops`: the flops of those that no activation goes through."""

    operators: tuple[Operator, ...]
    beside_flops: int = 0

    @cached_property
    def total_flops(self) -> int:
        return self.flops_of(range(len(self.operators))) + self.beside_flops

    def flops_of(self, numbers: Iterable[int]) -> int:
        """The sum of some operators' flops."""
        return sum(self.operators[number].flops for number in numbers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By operator: the numbers of those that read its result."""
        readers: list[list[int]] = [[] for _ in self.operators]
        for number, operator in enumerate(self.operators):
            for read in dict.fromkeys(operator.inputs):
                readers[read].append(number)
        return tuple(map(tuple, readers))

    @cached_property
    def longest_flops(self) -> int:
        """Flops of the most expensive chain of operators that read each other: more ranks do not shorten it."""
        ends: list[int] = []
        for operator in self.operators:
            ends.append(operator.flops + max((ends[read] for read in operator.inputs), default=0))
        return max(ends)

    @cached_property
    def dominators(self) -> tuple[int, ...]:
        """By operator: the nearest operator on all paths from the batch to it; the batch's is the batch."""
        dominators = [BATCH]
        for operator in self.operators[1:]:
            # One pass suffices: operators stand behind what they read (Cooper, Harvey, Kennedy, 2001, without the
            # loop).
            dominators.append(meeting(operator.inputs, dominators))
        return tuple(dominators)


def meeting(numbers: Iterable[int], dominators: Sequence[int]) -> int:
    """The nearest operator on all paths from the batch to all of these; it may be one of them.

    The lowest common ancestor in the tree of dominators, in which an ancestor's number is less than its descendants'.
    """
    waiting = set(numbers)
    while len(waiting) > 1:
        # The highest number cannot dominate the others, so its own dominator takes its place.
        highest = max(waiting)
        waiting.remove(highest)
        waiting.add(dominators[highest])
    return waiting.pop()
