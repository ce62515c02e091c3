"""Remedies that a program can follow, read from the `valid:` of a mistake.

| text                                        | remedies of the field `f`                            |
|---------------------------------------------|------------------------------------------------------|
| `1, 2, 4, ..., 64`; `none, auto`            | f=1, f=2, f=4, f=64; f=none, f=auto                  |
| `1 to 8`; `257 or more`; `a number > 0`     | f=1, f=8; f=257; f=1                                 |
| `8, any multiple`                           | f=8                                                  |
| `leave it out`                              | f left out                                           |
| `g=2`; `g=2 or more and h=4`                | g=2; g=2 and h=4                                     |
| `g=a, b`                                    | g=a, g=b                                             |

Alternatives are separated by `, `, `; ` and ` or `. Other words are for people alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from meshwright.ranks.errors import Problem


class Left(Enum):
    """A value that is none: equal to itself in another process as well."""

    OUT = "left out"


LEFT_OUT = Left.OUT
"""The value of a field that a remedy leaves out."""

Remedy: TypeAlias = Mapping[str, object]
"""Fields, and the text of the value that each takes, or LEFT_OUT."""

_SEPARATOR = re.compile(r"; or |, or |; | or (?!more|less)|, (?![^\[{(]*[\]})])")
_ASSIGNMENT = re.compile(r"([a-z_][\w.]*)=(\[.*\]|\{.*\}|[^\s,;()]+)")
_RANGE = re.compile(r"(-?\d+) to (-?\d+)")
_BOUND = re.compile(r"(?:a whole number|a number) (>=|>|<=|<) (-?[\d.]+)(?: and (?:<=|<) [\d.]+)?")
_VALUE = re.compile(r"(\S+|\[.*\]|\{.*\})(?: or (?:more|less))?")
_KINDS = {"a whole number": "1", "a number": "1"}


def of_problem(problem: Problem) -> tuple[Remedy, ...]:
    """Return the fields and values that mend a problem; the first is the plainest."""
    return problem.mend or remedies_of(problem.field, problem.valid)


def remedies_of(field: str, valid: str) -> tuple[Remedy, ...]:
    """Read the remedies of a field's mistake from the text of its valid values, in their order."""
    found: list[Remedy] = []
    named = field  # `g=a, b`: the second value is of g as well
    for item in map(str.strip, _SEPARATOR.split(valid)):
        assigned = dict(_ASSIGNMENT.findall(item))
        if assigned:
            named = next(iter(assigned)) if len(assigned) == 1 else field
        found += [assigned] if assigned else [{named: value} for value in _values(item)]
    return tuple(found)


def _values(item: str) -> Iterator[object]:
    """The values of one alternative that names no field."""
    if item == "leave it out":
        yield LEFT_OUT
    elif match := _RANGE.fullmatch(item):
        yield from dict.fromkeys(match.groups())
    elif match := _BOUND.fullmatch(item):
        sign, bound = match.groups()
        yield {">=": bound, "<=": bound, ">": f"{float(bound) + 1:g}", "<": f"{float(bound) - 1:g}"}[sign]
    elif item in _KINDS:
        yield _KINDS[item]
    elif (match := _VALUE.fullmatch(item)) and item not in ("", "..."):
        yield match[1]
