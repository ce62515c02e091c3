"""A model as a graph of operators with flops. The module needs no torch: graphs can be written by hand.

Operators on activations are in the graph; operators on weights alone, and masks, count in `beside_flops`. Operator 0 is
the batch. Operators are in topological order: an operator reads only results of lower numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

BATCH = 0
"""The number of the operator for the model's input."""


class OperatorKind(Enum):
    """Treatment of branches by an operator; branches are consecutive ranges of channels."""

    LINEAR = "linear"
    """An activation times a weight: each output channel depends on all input channels. Input or output can be cut."""
    HEADS = "heads"
    """Attention: its heads are branches by definition."""
    GROUPS = "groups"
    """A grouped convolution: its groups are branches by definition."""
    LOCAL = "local"
    """Element by element, channel by channel, or a view: branches stay separate."""
    OTHER = "other"
    """Any other operator: branches end here."""


@dataclass(frozen=True)
class Operator:
    """An operator on activations."""

    name: str
    path: str
    """The path of the operator's module."""
    inputs: tuple[int, ...]
    """The numbers of the operators that this one reads."""
    flops: int
    kind: OperatorKind
    width: int = 0
    """LINEAR: input channels. HEADS, GROUPS, a norm over groups of channels (LOCAL): the number of heads or groups.
    0: any number of branches may pass."""


@dataclass(frozen=True)
class OperatorGraph:
    """A model's operators. `beside_flops`: flops of operators that read no activation."""

    operators: tuple[Operator, ...]
    beside_flops: int = 0

    @cached_property
    def total_flops(self) -> int:
        return self.flops_of(range(len(self.operators))) + self.beside_flops

    def flops_of(self, numbers: Iterable[int]) -> int:
        """Return the sum of some operators' flops."""
        return sum(self.operators[index].flops for index in numbers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By operator: the numbers of the operators that read the result."""
        readers: list[list[int]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for read in dict.fromkeys(operator.inputs):
                readers[read].append(index)
        return tuple(map(tuple, readers))

    @cached_property
    def longest_flops(self) -> int:
        """Flops of the most expensive chain of operators that read each other; more ranks do not shorten the chain."""
        ends: list[int] = []
        for operator in self.operators:
            ends.append(operator.flops + max((ends[read] for read in operator.inputs), default=0))
        return max(ends)

    @cached_property
    def dominators(self) -> tuple[int, ...]:
        """By operator: the nearest operator on all paths from the batch (dominator). The batch dominates itself."""
        dominators = [BATCH]
        for operator in self.operators[1:]:
            # One pass suffices since operators are in topological order (Cooper, Harvey, Kennedy, 2001, without the
            # loop).
            dominators.append(meeting(operator.inputs, dominators))
        return tuple(dominators)


def meeting(numbers: Iterable[int], dominators: Sequence[int]) -> int:
    """Return the nearest operator on all paths from the batch to all of these operators; may be one of the operators.

    That is the lowest common ancestor in the tree of dominators; an ancestor's number is below a descendant's.
    """
    waiting = set(numbers)
    while len(waiting) > 1:
        # The highest number cannot dominate the others: replace the operator by its dominator.
        highest = max(waiting)
        waiting.remove(highest)
        waiting.add(dominators[highest])
    return waiting.pop()
