"""Legal cases: drawn at random, mended by what the config refuses, and arranged so that few cover every pair of values.

The config's rules are the only ones. A refusal names fields; the axes that write them are drawn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice
from random import Random

from meshwright.config import Config
from meshwright.config.load import parse_run
from meshwright.errors import ConfigError
from tests.fuzz.axes import AXES, FIELDS, Case, Value, tree_of, world_size

TRIES = 40
"""Values drawn again before a case is given up."""

RARE = 3000
"""Runs that are drawn for pairs that the fixed set lacks still."""

Pair = tuple[tuple[str, Value], tuple[str, Value]]
"""Two axes' values."""


@dataclass
class Drawing:
    """Draws legal cases of at most `most_ranks` ranks, and counts what was refused."""

    random: Random
    most_ranks: int = 8
    drawn: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by field."""

    def case(self, fixed: Mapping[str, Value] | None = None) -> tuple[Case, Config] | None:
        """A legal case that has the fixed values, or None where none was found."""
        fixed = fixed or {}
        case = {axis: self.random.choice(values) for axis, values in AXES.items()} | fixed
        for _ in range(TRIES):
            self.drawn += 1
            refused = self._refused(case)
            if isinstance(refused, Config):
                return case, refused
            self.refused.update(refused)
            case = case | self._again(case, self.random.choice(refused), fixed)
        return None

    def cases(self) -> Iterator[tuple[Case, Config]]:
        while True:
            found = self.case()
            if found is not None:
                yield found

    def _refused(self, case: Case) -> Config | list[str]:
        """The config of a legal case, or the fields that are refused."""
        if world_size(case) > self.most_ranks:
            return ["ranks"]
        try:
            return parse_run(tree_of(case))
        except ConfigError as error:
            return [problem.field for problem in error.problems]

    def _again(self, case: Case, refused: str, fixed: Mapping[str, Value]) -> Case:
        """Another value of an axis that writes the refused field, or where these are fixed of any other."""
        writes = [axis for axis, fields in FIELDS.items() if _writes(fields, refused) and axis not in fixed]
        if refused == "ranks":
            writes = [axis for axis in ("data", "stages", "tensor") if axis not in fixed]
        if not writes or self.random.random() < 0.3:  # the other side of the rule may be what has to give way
            writes = [axis for axis in AXES if axis not in fixed]
        axis = self.random.choice(writes)
        plain = None in AXES[axis] and self.random.random() < 0.5
        return {axis: None if plain else self.random.choice(AXES[axis])}


def _writes(fields: tuple[str, ...], refused: str) -> bool:
    return any(refused == one or refused.startswith(one + ".") or one.startswith(refused + ".") for one in fields)


def pairs_of(case: Case) -> set[Pair]:
    """All pairs of values of a case."""
    return set(combinations(case.items(), 2))


def all_pairs() -> list[Pair]:
    """Every pair of values of two axes, legal or not, in a fixed order."""
    pairs = dict.fromkeys(
        ((one, a), (other, b)) for one, other in combinations(AXES, 2) for a in AXES[one] for b in AXES[other]
    )
    return list(pairs)


def covering(seed: int, tries: int = 8, candidates: int = 60) -> list[Case]:
    """Legal cases that have every pair of values that any drawn case has; greedy.

    Each new case is the best of some that are drawn around a pair that is missing. A pair with which `tries` draws find
    no legal case counts as impossible.
    """
    drawing = Drawing(Random(seed))
    missing = dict.fromkeys(all_pairs())
    cases: list[Case] = []
    while missing:
        pair = next(iter(missing))
        drawn = [drawing.case(dict(pair)) for _ in range(tries)]
        if not any(drawn):
            del missing[pair]
            continue
        drawn += [drawing.case(dict(pair)) for _ in range(candidates)]
        best = max((found[0] for found in drawn if found), key=lambda case: _worth(case, missing))
        cases.append(best)
        for covered in pairs_of(best):
            missing.pop(covered, None)
    have = set().union(*map(pairs_of, cases))
    for case, _ in islice(drawing.cases(), RARE):  # pairs that few draws around them find
        if not pairs_of(case) <= have:
            cases.append(case)
            have |= pairs_of(case)
    return cases


def _worth(case: Case, missing: Mapping[Pair, None]) -> float:
    """How many missing pairs it covers; ranks cost time."""
    return len(pairs_of(case) & missing.keys()) / (8 + world_size(case))
