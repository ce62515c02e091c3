"""A rule: a generator of problems over the fields that it reads. The rules themselves: rules.py, tensor_rules.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.config.schema import Config
from meshwright.errors import Problem


def listed(values: list[int], most: int = 12) -> str:
    """The values as a short text, the middle left out where there are many."""
    if len(values) > most:
        return ", ".join(map(str, values[: most - 1])) + f", ..., {values[-1]}"
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class Rule:
    """A check over the fields it reads."""

    reads: tuple[str, ...]
    check: Callable[[Config], Iterator[Problem]]


def rule(*reads: str) -> Callable[[Callable[[Config], Iterator[Problem]]], Rule]:
    """Make the decorated check a rule over the fields that it reads."""
    return lambda check: Rule(reads, check)
