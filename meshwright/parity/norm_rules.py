"""The norm that a loop clips by, compared with full norms, and with the sums that wrong loops make.

A sentence is said only if its sum gives the loop's norm on every rank in every step that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest

import torch
from torch import Tensor

Mark = tuple[float, ...]
"""The sum of a gradient, and the norms of its pieces."""

EPSILON = 1e-6
"""The number that torch adds to a norm before it divides by it."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter. `place`: equal texts are copies, unless all values are one (`constant`). `trained`:
    the optimizer steps it; `before`, `after`: its gradient before clipping and at the step."""

    place: str
    constant: bool
    trained: bool
    before: Mark
    after: Mark


@dataclass(frozen=True)
class Clip:
    """A call that scales the gradients of these parameters by max_norm / total. `order`: of the norm."""

    names: frozenset[str]
    max_norm: float
    total: float
    order: float = 2.0


@dataclass(frozen=True)
class RankStep:
    """A step of one rank: its parts with gradients or states, and its calls."""

    parts: dict[str, Part]
    clips: tuple[Clip, ...]
    tolerance: float


@dataclass(frozen=True)
class NormFinding:
    """`factor`: the full norm over the loop's, which is 1 in a right loop; of gradients that are scaled late their
    scale, of copies that differ the greatest norm over the least."""

    kind: str
    module: str
    factor: float
    sentence: str


@dataclass
class Verdict:
    findings: list[NormFinding] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    judged: bool = True


@dataclass(frozen=True)
class Held:
    """A tensor, or one part: the ranks that hold copies, each with its name there. `open`: all values are one and the
    gradients differ, so that nothing tells parts from copies that were not reduced."""

    names: dict[int, str]
    open: bool = False


Pairs = tuple[tuple[int, str], ...]
"""Ranks, each with the name of a parameter there."""

FORMS = ("once", "each", "mean of squares", "sum of norms", "mean of norms")
"""How a loop may add up: each tensor once, or with its copies, and three wrong sums."""


def square(mark: Mark) -> float:
    return sum(norm * norm for norm in mark[1:])


def are_similar(marks: Sequence[Mark], tolerance: float, by_length: bool) -> bool:
    """Whether gradients are equal up to rounding. `by_length`: up to a factor."""
    sizes = [math.sqrt(square(mark)) for mark in marks]
    if by_length:
        marks = [tuple(x / size for x in mark) if size else mark for mark, size in zip(marks, sizes, strict=True)]
        sizes = [float(size > 0) for size in sizes]
    # A sum of many numbers may be larger than their norm, and rounds so.
    bound = tolerance * max(sizes)
    return all(
        max(column) - min(column) <= bound * (1 if place else 10)
        for place, column in enumerate(zip_longest(*marks, fillvalue=0.0))
    )


class Table:
    """The steps of all ranks. `hand`: the loop scales by itself, so that gradients are known after clipping alone.

    `squares`, `trained`: [steps, tensors, ranks], of gradients before clipping. `open`: [tensors]. `as_parts`: equal
    weights with different gradients are parts.
    """

    def __init__(self, steps: Sequence[Sequence[RankStep]], hand: bool, as_parts: bool = False) -> None:
        self.steps, self.hand = steps, hand
        self.num_ranks = len(steps[0])
        self.tolerance = max(each.tolerance for step in steps for each in step)
        self.floor = EPSILON * max(
            math.sqrt(sum(square(part.before) for each in step for part in each.parts.values())) for step in steps
        )
        self.held = [
            Held({rank: name}, held.open) if apart else held
            for held in self._held()
            for apart in [as_parts and not held.open and not self.copies_agree(held.names)]
            for rank, name in (held.names.items() if apart else [(0, "")])
        ]
        self.open = torch.tensor([held.open for held in self.held], dtype=torch.bool)
        self.squares = self.table(lambda t, rank, name, part: square(part.before))
        self.trained = self.table(lambda t, rank, name, part: float(part.trained)) > 0

    def table(self, value: Callable[[int, int, str, Part], float]) -> Tensor:
        """A number for each part in each step, 0 where a rank holds none."""
        found = torch.zeros(len(self.steps), len(self.held), self.num_ranks, dtype=torch.float64)
        for t, step in enumerate(self.steps):
            for h, held in enumerate(self.held):
                for rank, name in held.names.items():
                    if (part := step[rank].parts.get(name)) is not None:
                        found[t, h, rank] = value(t, rank, name, part)
        return found

    def trained_marks(self, t: int, names: dict[int, str], after: bool = False) -> dict[int, Mark]:
        """The gradients of some ranks' parts that are trained, by rank."""
        parts = {rank: part for rank, name in names.items() if (part := self.steps[t][rank].parts.get(name))}
        return {rank: part.after if after else part.before for rank, part in parts.items() if part.trained}

    def copies_agree(self, names: dict[int, str], after: bool = False) -> bool:
        """Whether all ranks have the same gradient, in every step. A norm of its own may have scaled it by hand."""
        for t in range(len(self.steps)):
            marks = list(self.trained_marks(t, names, after).values())
            large = any(math.sqrt(square(mark)) > self.floor for mark in marks)
            if large and not are_similar(marks, 10 * self.tolerance, self.hand):
                return False
        return True

    def _held(self) -> Iterator[Held]:
        """Parts of one name and place are copies. Where all values are one, gradients decide, then the module's
        other parameters."""
        groups: dict[str, dict[str, dict[int, Part]]] = {}  # by name, then by place
        for step in self.steps:
            for rank, each in enumerate(step):
                for name, part in each.parts.items():
                    groups.setdefault(name, {}).setdefault(part.place, {}).setdefault(rank, part)
        modules: dict[str, list[dict[int, Part]]] = {}
        for name, places in groups.items():
            modules.setdefault(name.rpartition(".")[0], []).extend(places.values())
        found: dict[str, list[Held]] = {}  # by place
        for name, places in groups.items():
            for place, parts in places.items():
                names, first = dict.fromkeys(sorted(parts), name), min(parts)
                if not parts[first].constant:
                    # A tied tensor has another name on another stage.
                    twins = found.setdefault(place, [])
                    for index, twin in enumerate(twins):
                        if not twin.names.keys() & names.keys() and self.copies_agree(twin.names | names):
                            twins[index] = Held(twin.names | names)
                            break
                    else:
                        twins.append(Held(names))
                elif self.copies_agree(names):
                    yield Held(names)
                else:
                    beside = [len(theirs) > 1 for theirs in modules[name.rpartition(".")[0]]
                              if first in theirs and not theirs[first].constant]  # fmt: skip
                    alone = bool(beside) and not any(beside)
                    yield from (Held({rank: name}) for rank in names) if alone else (Held(names, not beside),)
        for twins in found.values():
            yield from twins

    def full(self, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of full tensors by step: its least and its greatest value, which differ by what is open."""
        squares = self.squares * counted
        greatest = squares.amax(2)
        least = torch.where(self.open, 0.0, greatest).sum(1).sqrt()
        return least, torch.where(self.open, squares.sum(2), greatest).sum(1).sqrt()

    def forms(self, counted: Tensor, line: Sequence[int]) -> dict[str, Tensor]:
        """The norms by step that a loop may make on some ranks, right or wrong."""
        squares = (self.squares * counted)[:, :, list(line)]
        own = squares.sum(1)
        once = torch.where(self.open, squares.sum(2), squares.amax(2)).sum(1)
        sums = (once.sqrt(), own.sum(1).sqrt(), own.mean(1).sqrt(), own.sqrt().sum(1), own.sqrt().mean(1))
        return dict(zip(FORMS, sums, strict=True))


Line = Callable[[int], tuple[int, ...]]
"""The ranks that a rank adds up with."""


def lines_of(num_ranks: int) -> Iterator[Line]:
    """The groups over which a loop may sum: all ranks, one, then every size and distance."""
    shapes = [(size, stride) for size in range(2, num_ranks) if num_ranks % size == 0
              for stride in range(1, num_ranks) if num_ranks % (size * stride) == 0]  # fmt: skip
    for size, stride in [(num_ranks, 1), *([(1, 1)] if num_ranks > 1 else []), *shapes]:

        def line(rank: int, size: int = size, stride: int = stride) -> tuple[int, ...]:
            start = rank - rank // stride % size * stride
            return tuple(start + place * stride for place in range(size))

        yield line


@dataclass(frozen=True)
class Explanation:
    """Why a norm is another: `lacks` and `extra`: parts that it leaves out or counts; `line`, `form`: the ranks that
    it adds up, and how."""

    lacks: Pairs
    extra: Pairs
    line: Line
    form: str


class Scope:
    """One clipping of each step. `used`: the loop's norm, [steps, ranks], NaN where a rank clips nothing. `wanted`,
    `passed`: the parts that it should and does scale, [steps, tensors, ranks]."""

    def __init__(self, table: Table, number: int, clips: list[list[list[Clip]]], alone: bool) -> None:
        self.table = table
        self.clips = [{rank: own[number] for rank, own in enumerate(step) if own} for step in clips]
        self.max_norm = next(clip.max_norm for step in self.clips for clip in step.values())
        self.used = torch.full((len(clips), table.num_ranks), math.nan, dtype=torch.float64)
        for t, step in enumerate(self.clips):
            for rank, clip in step.items():
                self.used[t, rank] = clip.total
        every = {name for step in self.clips for clip in step.values() for name in clip.names}
        own = table.table(lambda t, rank, name, part: float(alone or name in every)) > 0
        self.wanted = table.trained & own
        self.passed = (
            table.table(lambda t, r, name, _: float(r in self.clips[t] and name in self.clips[t][r].names)) > 0
        )
        self.lacks = self.pairs(self.wanted & ~self.passed)
        self.extra = self.pairs(self.passed & ~table.trained)
        # Scaled gradients miss max_norm by the number that torch adds, too.
        self.slack = table.tolerance + (2 * EPSILON / self.max_norm if table.hand else 0.0)

    def pairs(self, mask: Tensor) -> Pairs:
        """The ranks and names of a mask with a gradient in any step."""
        some = (mask & (self.table.squares > 0)).any(0).nonzero().tolist()
        return tuple((rank, self.table.held[h].names[rank]) for h, rank in some)

    def is_full(self) -> bool:
        """Whether the loop's norm is the full one on every rank in every step."""
        least, most = self.table.full(self.wanted)
        if self.table.hand:
            if bool((least > self.max_norm * (1 + self.slack)).any()):
                return False
            return self.is_reached() or self.explanation() is None
        low, high = least[:, None] * (1 - self.slack), most[:, None] * (1 + self.slack)
        return bool((((self.used >= low) & (self.used <= high)) | self.used.isnan()).all())

    def is_reached(self) -> bool:
        """Whether the full norm is max_norm, or more, in any step."""
        return bool((self.table.full(self.wanted)[1] >= self.max_norm * (1 - self.slack)).any())

    def is_used(self, values: Tensor) -> bool:
        """Whether these norms, [steps, ranks], are the loop's own."""
        near = (self.used - values).abs() <= self.slack * values
        if self.table.hand:
            # A norm below max_norm scales nothing. One rank in every step must reach it: a coincidence is no proof.
            return bool(near.any(1).all()) and bool((near | (values < self.used)).all())
        return bool((near | self.used.isnan()).all())

    def explanation(self) -> Explanation | None:
        """The first sum, from the simplest, that gives the loop's norms."""
        counts: list[tuple[Tensor, Pairs, Pairs]] = [(self.wanted, (), ())]
        if self.lacks or self.extra:
            counts.append((self.passed, self.lacks, self.extra))
        # No rank counts parts; or one rank does, as if they were copies; or a module of one name is missing.
        cut = torch.tensor([held.open or len(held.names) < self.table.num_ranks for held in self.table.held])[:, None]
        counts.append((self.wanted & ~cut, self.pairs(self.wanted & cut), ()))
        lowest: dict[str, int] = {}
        for rank, name in self.pairs(self.wanted):
            lowest[name] = min(rank, lowest.get(name, rank))
        others = self.table.table(lambda t, rank, name, _: float(rank > lowest.get(name, rank))) > 0
        counts.append((self.wanted & ~(others & cut), self.pairs(self.wanted & others & cut), ()))
        names = {name for held in self.table.held for name in held.names.values()}
        for word in sorted({word for name in names for word in name.split(".") if not word.isdigit()}):
            has = self.table.table(lambda t, rank, name, _, word=word: float(word in name.split("."))) > 0  # type: ignore[misc]
            counts.append((self.wanted & ~has, self.pairs(self.wanted & has), ()))
        ranks = range(self.table.num_ranks)
        for counted, lacks, extra in counts:
            lines = list(lines_of(self.table.num_ranks))
            sums = {group: self.table.forms(counted, group) for line in lines for group in map(line, ranks)}
            # A rank's own norm before wrong sums: once scaled by hand, every rank has the same.
            for form, line in product(FORMS, lines):
                if self.is_used(torch.stack([sums[line(rank)][form] for rank in ranks], 1)):
                    return Explanation(lacks, extra, line, form)
        return None


def module_of(table: Table, pairs: Sequence[tuple[int, str]]) -> str:
    """The module of the largest of some gradients."""
    sizes = {(r, name): table.squares[0, h, r] for h, held in enumerate(table.held) for r, name in held.names.items()}
    name = max(pairs, key=lambda pair: float(sizes[pair]))[1]
    return name.rpartition(".")[0] or name


def number(x: float | Tensor) -> str:
    return f"{float(x):.4g}"


def by_rank(norms: dict[int, float]) -> str:
    """Norms as a text: one if all ranks have it, otherwise those of the first ranks."""
    if max(norms.values()) - min(norms.values()) <= 1e-4 * max(norms.values()):
        return number(next(iter(norms.values())))
    shown = ", ".join(f"{number(norm)} on rank {rank}" for rank, norm in list(norms.items())[:4])
    return shown + (", ..." if len(norms) > 4 else "")


def listed(pairs: Sequence[tuple[int, str]]) -> str:
    """Names as a text: the first two, and the number of others."""
    names = list(dict.fromkeys(name for _, name in pairs))
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def causes_of(scope: Scope, found: Explanation) -> Iterator[tuple[str, str, str, str]]:
    """(kind, module, cause, remedy) of each part of an explanation."""
    table, ranks = scope.table, range(scope.table.num_ranks)
    if found.extra:
        yield ("frozen", module_of(table, found.extra),
               f"it counts {listed(found.extra)}, which the optimizer does not train",
               "clip the optimizer's own parameters, or set the others' gradients to None "
               "(several optimizers: give norm_probe all of them)")  # fmt: skip
    if found.lacks:
        module, lacking = module_of(table, found.lacks), sorted({rank for rank, _ in found.lacks})
        whose = f" of rank {', '.join(map(str, lacking))}" if len(lacking) < table.num_ranks else ""
        yield ("left out", module, f"it leaves out {listed(found.lacks)}{whose}",
               f"clip all that the optimizer trains, with the squares of {module} added over the ranks that hold "
               "its parts")  # fmt: skip
    counted = scope.wanted | scope.passed
    held = [each for h, each in enumerate(table.held) if bool(counted[:, h].any())]
    lines = [set(found.line(rank)) for rank in ranks]
    missed = [each for each in held if any(not each.names.keys() & line for line in lines)]
    if missed:
        whose = f"the parts of {len(lines[0])} of {len(lines)} ranks" if len(lines[0]) > 1 else "its own part"
        yield ("own part", module_of(table, [pair for each in missed for pair in each.names.items()]),
               f"each rank counts {whose} alone",
               "sum the squares over all ranks that hold different parts, copies once, then take the root")  # fmt: skip
    if found.form == "each":
        times = [max(len(each.names.keys() & line) for line in lines) for each in held]
        pairs = [pair for each, k in zip(held, times, strict=True) if k > 1 for pair in each.names.items()]
        module = module_of(table, pairs)
        yield ("copies", module, f"it counts {max(times)} copies of each tensor of {module}",
               "count a tensor that several ranks hold on one of them")  # fmt: skip
    elif found.form != "once":
        yield ("wrong sum", "(all parameters)", f"it is the {found.form} of {len(found.line(0))} ranks",
               "sum the squares of the norms over the ranks, and take the root of the sum")  # fmt: skip


def wrong_norm(scope: Scope) -> NormFinding:
    """The finding on a loop's norm that is not the full one."""
    table, found = scope.table, scope.explanation()
    full = table.full(scope.wanted)[1]
    ratios = full[:, None] / scope.used
    distance = ratios.log().abs().nan_to_num(0.0, 0.0, 0.0)
    t = int(distance.amax(1).argmax())
    factor = float(ratios[t, int(distance[t].argmax())])
    causes = list(causes_of(scope, found)) if found is not None else [
        ("unexplained", "(all parameters)", "no sum of these gradients gives it",
         "compare the norm that the loop logs with the full one")]  # fmt: skip
    kind, module, _, _ = causes[0]
    if table.hand:
        facts = f"clipped gradients have a norm of {number(full[t])} in step {t + 1}, {number(factor)} times max_norm"
    else:
        used = {rank: float(norm) for rank, norm in enumerate(scope.used[t]) if not norm.isnan()}
        facts = f"the loop clips by {by_rank(used)} in step {t + 1}, the full gradients have {number(full[t])}"
        facts += f" ({number(factor)} times as much)"
    whys, remedies = " and ".join(each[2] for each in causes), "; ".join(each[3] for each in causes)
    words = f"{module}: {facts}: {whys}; {remedies}"
    return NormFinding(kind, module, factor, words)


def unreduced(table: Table) -> Iterator[NormFinding]:
    """Copies whose gradients differ before clipping in the last step: as they step as well, or no more."""
    t = len(table.steps) - 1
    differing = [held for held in table.held if not held.open and not table.copies_agree(held.names)]
    if not differing:
        return
    pairs = [pair for held in differing for pair in held.names.items()]
    module = module_of(table, pairs)
    held = max(differing, key=lambda each: max(map(square, table.trained_marks(t, each.names).values()), default=0.0))
    norms = {rank: math.sqrt(square(mark)) for rank, mark in table.trained_marks(t, held.names).items()}
    facts = f"ranks {', '.join(map(str, norms))} hold copies of {listed(pairs)}"
    factor = max(norms.values()) / min(norms.values()) if min(norms.values()) else math.inf
    which = f"of norm {by_rank(norms)} in step {t + 1}"
    if not table.hand and all(table.copies_agree(each.names, after=True) for each in differing):
        yield NormFinding("not reduced before", module, factor,
            f"{module}: the norm is taken before gradients are reduced: {facts} with gradients {which} as they are "
            "clipped, and with one gradient as they step; reduce gradients first, then clip")  # fmt: skip
        return
    yield NormFinding("missing reduction", module, factor,
        f"{module}: {facts} with different gradients, {which}; reduce them over these ranks, or, if they are parts "
        "(experts), start each from another seed")  # fmt: skip


def scaled_late(scopes: Sequence[Scope]) -> Iterator[NormFinding]:
    """All gradients of all ranks were multiplied by one number between clipping and the step."""
    ratios = []
    for scope in scopes:
        for t, clips in enumerate(scope.clips):
            for rank, clip in clips.items():
                coefficient = min(1.0, clip.max_norm / (clip.total + EPSILON))
                parts = [scope.table.steps[t][rank].parts[name] for name in clip.names]
                ratios += [
                    math.sqrt(square(p.after) / square(p.before)) / coefficient for p in parts if square(p.before)
                ]
    slack = 10 * scopes[0].table.tolerance
    if ratios and max(ratios) - min(ratios) <= slack * max(ratios) and abs(ratios[0] - 1) > slack:
        yield NormFinding("scaled late", "(all parameters)", ratios[0],
            f"(all parameters): gradients are multiplied by {number(ratios[0])} between clipping and the step; scale "
            "or average gradients first, then clip")  # fmt: skip


def merged(clips: Sequence[Clip]) -> list[Clip]:
    """Calls of a step with one norm are one clipping of several groups of parameters."""
    found: list[Clip] = []
    for clip in clips:
        for place, other in enumerate(found):
            if math.isclose(other.total, clip.total, rel_tol=1e-6) and other.max_norm == clip.max_norm:
                found[place] = replace(other, names=other.names | clip.names)
                break
        else:
            found.append(clip)
    return found


def wrong_clipping(scopes: Sequence[Scope]) -> list[NormFinding]:
    """Wrong norms; without any, gradients that no norm scales, or that are scaled again."""
    table = scopes[0].table
    findings = [wrong_norm(scope) for scope in scopes if not scope.is_full()]
    if findings or table.hand:
        return findings
    scaled = {pair for scope in scopes for pair in scope.pairs(scope.passed)}
    if left := sorted(set(scopes[0].pairs(table.trained)) - scaled):
        module = module_of(table, left)
        words = f"{module}: {listed(left)} are not scaled; give the clipping function all that the optimizer trains"
        return [NormFinding("not scaled", module, 1.0, words)]
    return list(scaled_late(scopes))


def not_judged(clips: list[list[list[Clip]]]) -> str:
    """Why some clipping cannot be judged; empty if it can."""
    numbers = {len(own) for step in clips for own in step if own}
    if not numbers:
        return "the loop gives no gradient to a clipping function of torch: give max_norm= if it clips by hand"
    if len(numbers) > 1:
        return "ranks clip unequally often in a step"
    other = any(clip.order != 2 for step in clips for own in step for clip in own)
    return "the norm is of another order than 2" if other else ""


def counted_as_parts(steps: Sequence[Sequence[RankStep]], clips: list[list[list[Clip]]], hand: bool) -> str:
    """A note on equal weights with different gradients, if the loop's norms are right with these as parts; or empty.

    Experts that start from one seed look like copies that nobody reduces, and the loop knows.
    """
    if not list(unreduced(Table(steps, hand))):
        return ""
    table = Table(steps, hand, as_parts=True)
    number_of = max(len(own) for own in clips[0])
    scopes = [Scope(table, place, clips, number_of == 1) for place in range(number_of)]
    if wrong_clipping(scopes) or (hand and not scopes[0].is_reached()):
        return ""
    held = [each for each in Table(steps, hand).held if not each.open]
    pairs = [pair for each in held if each not in table.held for pair in each.names.items()]
    return f"; {listed(pairs)} start equal on several ranks with different gradients, and are counted as parts"


def judged(steps: Sequence[Sequence[RankStep]], max_norm: float | None) -> Verdict:
    """The verdict on some steps of all ranks. `max_norm`: of a loop that does not call torch's functions."""
    clipped = any(each.clips for step in steps for each in step)
    hand = not clipped and max_norm is not None
    if max_norm is not None and hand:
        # All that has a gradient may have been counted.
        steps = [
            [replace(each, clips=(Clip(frozenset(each.parts), max_norm, max_norm),)) for each in step] for step in steps
        ]
    elif clipped:
        steps = [step for step in steps if any(each.clips for each in step)]
    if not steps:
        return Verdict([], ["the optimizer has not stepped: call check() behind the loop"], judged=False)
    clips = [[merged(each.clips) for each in step] for step in steps]
    reason, findings = not_judged(clips), list[NormFinding]()
    number_of = max(len(own) for own in clips[0])
    alike = "" if reason else counted_as_parts(steps, clips, hand)
    for length in range(1, len(steps) + 1):
        table = Table(steps[:length], hand, as_parts=bool(alike))
        # A wrong norm parts copies a step later: the first step that shows something decides.
        if (apart := list(unreduced(table))) or reason:
            findings = findings or apart
        else:
            scopes = [Scope(table, place, clips[:length], number_of == 1) for place in range(number_of)]
            findings = wrong_clipping(scopes)
        if apart:
            break
    full = table.full(table.trained)[1]
    norm = f"a norm of {number(full[0])} in step 1"
    where = f"{len(steps)} step{'s' * (len(steps) > 1)} of {table.num_ranks} rank{'s' * (table.num_ranks > 1)}"
    if findings:
        return Verdict(findings, [each.sentence for each in findings])
    if reason:
        return Verdict([], [f"{where} cannot be judged, {reason}; the full gradients have {norm}"], judged=False)
    if hand and not scopes[0].is_reached():
        words = f"the full gradients have {norm} and reach max_norm in none of {where}"
        return Verdict([], [f"{words}: give loop and probe a smaller max_norm for a proof"], judged=False)
    return Verdict(
        [], [f"{where} clip by the norm of the full gradients: {norm} (max_norm {number(scopes[0].max_norm)}){alike}"]
    )
