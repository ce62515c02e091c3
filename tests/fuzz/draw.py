"""Legal cases: drawn at random, mended by the config's refusals, and arranged so that few cover every pair of values.

The config's rules are the only rules. A refusal names fields; the axes that write these fields are drawn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from random import Random

from meshwright.config import Config
from meshwright.config.load import parse_run
from meshwright.ranks.errors import ConfigError
from tests.fuzz.axes import AXES, FIELDS, Case, Value, tree_of, world_size

TRIES = 40
"""Values drawn again before a case is given up."""

RARE = 3000
"""Runs drawn for pairs that the fixed set still lacks."""

BESIDE = 4
"""Attempts with another value changed as well, if a case cannot take a pair alone."""

Pair = tuple[tuple[str, Value], tuple[str, Value]]
"""Two axes' values."""


@dataclass
class Drawing:
    """Draws legal cases of at most `most_ranks` ranks, and counts refusals."""

    random: Random
    most_ranks: int = 8
    drawn: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by field."""

    def case(self, fixed: Mapping[str, Value] | None = None) -> tuple[Case, Config] | None:
        """Return a legal case with the fixed values, or None if no case was found."""
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

    def is_legal(self, case: Case) -> bool:
        return isinstance(self._refused(case), Config)

    def _refused(self, case: Case) -> Config | list[str]:
        """Return the config of a legal case, or the refused fields."""
        if world_size(case) > self.most_ranks:
            return ["ranks"]
        try:
            return parse_run(tree_of(case))
        except ConfigError as error:
            return [problem.field for problem in error.problems]

    def _again(self, case: Case, refused: str, fixed: Mapping[str, Value]) -> Case:
        """Return another value of an axis that writes the refused field or, if all are fixed, of any other axis."""
        writes = [axis for axis, fields in FIELDS.items() if _writes(fields, refused) and axis not in fixed]
        if refused == "ranks":
            writes = [axis for axis in ("data", "stages", "tensor", "context") if axis not in fixed]
        if not writes or self.random.random() < 0.3:  # the rule's other side may have to change
            writes = [axis for axis in AXES if axis not in fixed]
        axis = self.random.choice(writes)
        plain = None in AXES[axis] and self.random.random() < 0.5
        return {axis: None if plain else self.random.choice(AXES[axis])}


def _writes(fields: tuple[str, ...], refused: str) -> bool:
    return any(refused == one or refused.startswith(one + ".") or one.startswith(refused + ".") for one in fields)


def pairs_of(case: Case) -> set[Pair]:
    """Return all pairs of values of a case."""
    return set(combinations(case.items(), 2))


def all_pairs() -> list[Pair]:
    """Return every pair of values of two axes, legal or not, in a fixed order."""
    pairs = dict.fromkeys(
        ((one, a), (other, b)) for one, other in combinations(AXES, 2) for a in AXES[one] for b in AXES[other]
    )
    return list(pairs)


def covering(seed: int, kept: Sequence[Case] = (), tries: int = 8, climbs: int = 150) -> list[Case]:
    """Return few legal cases that have every pair of values of any drawn case.

    Each case is the best of some drawn around a missing pair, then changed, a value or two at a time, while the case
    covers more. At last a case is removed if the others can take the case's pairs, and the remaining cases become
    cheaper. A pair for which `tries` draws find no legal case counts as impossible.

    `kept`: the first cases, if still legal. A kept case has no value of an axis that is new since then, and only pairs
    with a value that no kept case has are looked for. Kept cases stay unchanged: plants are looked for in cases by
    name.
    """
    drawing = Drawing(Random(seed))
    cases = [case for case in kept if drawing.is_legal(case)]
    num_kept = len(cases)
    had = {item for case in cases for item in case.items()}
    missing = dict.fromkeys(pair for pair in all_pairs() if not had.issuperset(pair))
    while missing:
        pair = next(iter(missing))
        found = [case for case in (drawing.case(dict(pair)) for _ in range(tries)) if case]
        if not found:
            del missing[pair]
            continue
        best = max((case for case, _ in found), key=lambda case: _worth(case, missing))
        cases.append(_climbed(best, pair, missing, drawing, climbs))
        for covered in pairs_of(cases[-1]):
            missing.pop(covered, None)
    have = set().union(*map(pairs_of, cases))
    for case, _ in islice(drawing.cases(), RARE):  # pairs that few draws around a pair find
        if not pairs_of(case) <= have:
            cases.append(case)
            have |= pairs_of(case)
    arrangement = Arrangement(cases, drawing, num_kept)
    arrangement.spread()
    arrangement.cheapen()
    return list(arrangement.cases.values())


def _climbed(case: Case, pair: Pair, missing: Mapping[Pair, None], drawing: Drawing, climbs: int) -> Case:
    """Return the case with other values of the axes outside its pair, if the case then covers more."""
    axes = [axis for axis in AXES if axis not in dict(pair)]
    for _ in range(climbs):
        changed = drawing.random.sample(axes, drawing.random.choice((1, 1, 2)))
        other = case | {axis: drawing.random.choice(AXES[axis]) for axis in changed}
        if _worth(other, missing) > _worth(case, missing) and drawing.is_legal(other):
            case = other
    return case


class Arrangement:
    """Cases that have every pair; cases after the first `num_kept` are changed while no pair is lost."""

    def __init__(self, cases: Sequence[Case], drawing: Drawing, num_kept: int) -> None:
        self.cases, self.drawing, self.num_kept = dict(enumerate(cases)), drawing, num_kept
        self.holders = Counter(pair for case in cases for pair in pairs_of(case))
        """The number of cases that have a pair."""

    def spread(self) -> None:
        """Remove each case with pairs that the others can have: first the case with the fewest pairs alone."""
        alone = {
            index: sum(self.holders[pair] == 1 for pair in pairs_of(self.cases[index])) for index in self._changeable
        }
        for index in sorted(alone, key=lambda index: alone[index]):
            before, holders = dict(self.cases), self.holders.copy()
            pairs = pairs_of(self.cases.pop(index))
            self.holders.subtract(pairs)
            if not all(self.holders[pair] or self._placed(pair) for pair in sorted(pairs, key=repr)):
                self.cases, self.holders = before, holders

    def cheapen(self, tries: int = 200) -> None:
        """Give each case cheaper values, one to three at a time."""
        for index in self._changeable:
            for _ in range(tries):
                other = self.cases[index] | self._drawn(self.drawing.random.choice((1, 2, 3)))
                if cost(other) < cost(self.cases[index]):
                    self._replaced(index, other)

    @property
    def _changeable(self) -> list[int]:
        return [index for index in self.cases if index >= self.num_kept]

    def _placed(self, pair: Pair) -> bool:
        """Return whether a case took the pair over without losing another pair; cheap cases first."""
        values = dict(pair)
        for index in sorted(self._changeable, key=lambda index: cost(self.cases[index] | values)):
            case = self.cases[index]
            if self._keeps_all(case, case | values):
                beside = [{}, *(self._drawn(1) for _ in range(BESIDE))]
                if any(self._replaced(index, case | more | values) for more in beside):
                    return True
        return False

    def _drawn(self, number: int) -> Case:
        """Return values of some axes."""
        random = self.drawing.random
        return {axis: random.choice(AXES[axis]) for axis in random.sample(list(AXES), number)}

    def _keeps_all(self, case: Case, other: Case) -> bool:
        """Return whether another case has every pair that only this case has."""
        changed = {axis for axis in AXES if case[axis] != other[axis]}
        return all(
            self.holders[one, two] > 1
            for one, two in combinations(case.items(), 2)
            if one[0] in changed or two[0] in changed
        )

    def _replaced(self, index: int, other: Case) -> bool:
        """Replace a case by another case if the other is legal and no pair is lost; return whether it was replaced."""
        case = self.cases[index]
        if not self._keeps_all(case, other) or not self.drawing.is_legal(other):
            return False
        self.holders.subtract(pairs_of(case))
        self.holders.update(pairs_of(other))
        self.cases[index] = other
        return True


def few_of(cases: Sequence[Case], axes: Collection[tuple[str, str]]) -> set[int]:
    """Return the numbers of few cases with every value, and every pair of values of these pairs of axes, of all cases.

    Each is the case with the most missing values and pairs for its cost. Needless cases are removed at the end.
    """
    held = {number: {*case.items(), *pairs_of_axes(case, axes)} for number, case in enumerate(cases)}
    missing, chosen = set().union(*held.values()), dict[int, None]()
    while missing:
        best = max(held, key=lambda number: len(held[number] & missing) / cost(cases[number]))
        chosen[best] = None
        missing -= held[best]
    for number in sorted(chosen, key=lambda number: -cost(cases[number])):
        if held[number] <= set().union(*(held[other] for other in chosen if other != number)):
            del chosen[number]
    return set(chosen)


def pairs_of_axes(case: Case, axes: Iterable[tuple[str, str]]) -> Iterator[Pair]:
    """Yield the pairs of a case's values of these pairs of axes."""
    return (((one, case[one]), (other, case[other])) for one, other in axes)


def cost(case: Case) -> float:
    """Return the relative cost of a case: the ranks, and the products of a real vocabulary."""
    return (12 + world_size(case)) * (4 if case["vocabulary"] == "real" else 1)


def _worth(case: Case, missing: Mapping[Pair, None]) -> float:
    """Return the number of missing pairs that a case covers, for the case's cost."""
    return len(pairs_of(case) & missing.keys()) / cost(case)
