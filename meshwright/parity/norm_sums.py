"""Computes the norms that a loop may use for clipping, right and wrong, from the norms of all ranks' gradients."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product, zip_longest

import torch
from torch import Tensor

from meshwright.ranks.foreign import parse_json

Mark = tuple[float, ...]
"""The sum of a gradient, and the norms of its pieces."""

EPSILON = 1e-6
"""The number that torch adds to a norm before a division by the norm."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter."""

    fingerprint: str
    """Shape, offsets and hash of values as a text; equal texts are copies, unless `constant`."""
    constant: bool
    """True if all values are equal."""
    trained: bool
    """True if the optimizer steps the part."""
    before: Mark
    """The gradient before clipping."""
    after: Mark
    """The gradient at the optimizer's step."""


@dataclass(frozen=True)
class Clip:
    """A call that scales the gradients of `names` by max_norm / total."""

    names: frozenset[str]
    max_norm: float
    total: float
    """The loop's norm."""
    order: float = 2.0
    """The order of the norm."""


@dataclass(frozen=True)
class RankStep:
    """A step of one rank: parts with gradients or optimizer states, and clipping calls."""

    parts: dict[str, Part]
    clips: tuple[Clip, ...]
    tolerance: float

    def as_json(self) -> bytes:
        """Return the step as JSON for other ranks."""
        clips = [asdict(clip) | {"names": sorted(clip.names)} for clip in self.clips]
        parts = {name: asdict(shard) for name, shard in self.parts.items()}
        return json.dumps({"parts": parts, "clips": clips, "tolerance": self.tolerance}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankStep:
        """Read the JSON of another rank."""
        tree = parse_json(text)
        parts = {name: Part(**fields | {key: tuple(fields[key]) for key in ("before", "after")})
                 for name, fields in tree["parts"].items()}  # fmt: skip
        clips = tuple(Clip(**clip | {"names": frozenset(clip["names"])}) for clip in tree["clips"])
        return cls(parts, clips, tree["tolerance"])


@dataclass(frozen=True)
class Held:
    """A tensor, or one part of a tensor, with its copies."""

    names: dict[int, str]
    """By rank with a copy, the parameter's name on this rank."""
    open: bool = False
    """True if the part is constant and gradients differ: it is unknown if these are parts, or copies not reduced."""


Pairs = tuple[tuple[int, str], ...]
"""(rank, name of a parameter on the rank)."""

FORMS = ("once", "each", "mean of squares", "sum of norms", "mean of norms")
"""The sums of a loop: each tensor once, or each copy, and three wrong sums."""


def square(mark: Mark) -> float:
    return sum(norm * norm for norm in mark[1:])


def are_similar(marks: Sequence[Mark], tolerance: float, by_length: bool) -> bool:
    """Return True if gradients are equal up to rounding. `by_length`: also up to a factor."""
    sizes = [math.sqrt(square(mark)) for mark in marks]
    if by_length:
        marks = [tuple(x / size for x in mark) if size else mark for mark, size in zip(marks, sizes, strict=True)]
        sizes = [float(size > 0) for size in sizes]
    # A sum of many numbers may be larger than the norm, with a larger rounding error.
    bound = tolerance * max(sizes)
    return all(
        max(column) - min(column) <= bound * (1 if index else 10)
        for index, column in enumerate(zip_longest(*marks, fillvalue=0.0))
    )


class Table:
    """The gradients of all ranks by step.

    Attributes:
        hand: True if the loop scales gradients by hand; gradients are then known only after clipping.
        squares: [steps, tensors, ranks], squared norms of gradients before clipping.
        trained: [steps, tensors, ranks], True if the optimizer steps the tensor.
        open: [tensors], as in `Held`.
    """

    def __init__(self, steps: Sequence[Sequence[RankStep]], hand: bool, as_parts: bool = False) -> None:
        self.steps, self.hand = steps, hand
        self.num_ranks = len(steps[0])
        self.tolerance = max(each.tolerance for step in steps for each in step)
        self.floor = EPSILON * max(
            math.sqrt(sum(square(shard.before) for each in step for shard in each.parts.values())) for step in steps
        )
        self.held = [
            Held({rank: name}, held.open) if apart else held
            for held in self._held()
            for apart in [as_parts and not held.open and not self.copies_agree(held.names)]
            for rank, name in (held.names.items() if apart else [(0, "")])
        ]
        self.open = torch.tensor([held.open for held in self.held], dtype=torch.bool)
        self.squares = self.table(lambda t, rank, name, shard: square(shard.before))
        self.trained = self.table(lambda t, rank, name, shard: float(shard.trained)) > 0

    def table(self, value: Callable[[int, int, str, Part], float]) -> Tensor:
        """Return value(step, rank, name, part) for each part, [steps, tensors, ranks]; 0 for ranks without a part."""
        found = torch.zeros(len(self.steps), len(self.held), self.num_ranks, dtype=torch.float64)
        for t, step in enumerate(self.steps):
            for h, held in enumerate(self.held):
                for rank, name in held.names.items():
                    if (shard := step[rank].parts.get(name)) is not None:
                        found[t, h, rank] = value(t, rank, name, shard)
        return found

    def trained_marks(self, t: int, names: dict[int, str], after: bool = False) -> dict[int, Mark]:
        """Return the gradients of some ranks' trained parts, by rank."""
        parts = {rank: shard for rank, name in names.items() if (shard := self.steps[t][rank].parts.get(name))}
        return {rank: shard.after if after else shard.before for rank, shard in parts.items() if shard.trained}

    def copies_agree(self, names: dict[int, str], after: bool = False) -> bool:
        """Return True if all ranks have equal gradients in every step; with `hand`, up to a factor per rank."""
        for t in range(len(self.steps)):
            marks = list(self.trained_marks(t, names, after).values())
            large = any(math.sqrt(square(mark)) > self.floor for mark in marks)
            if large and not are_similar(marks, 10 * self.tolerance, self.hand):
                return False
        return True

    def _held(self) -> Iterator[Held]:
        """Yield the tensors with their copies. Parts of one name and fingerprint are copies.

        For constant parts the gradients decide, then the other parameters of the module.
        """
        groups: dict[str, dict[str, dict[int, Part]]] = {}  # by name, then by fingerprint
        for step in self.steps:
            for rank, each in enumerate(step):
                for name, shard in each.parts.items():
                    groups.setdefault(name, {}).setdefault(shard.fingerprint, {}).setdefault(rank, shard)
        modules: dict[str, list[dict[int, Part]]] = {}
        for name, places in groups.items():
            modules.setdefault(name.rpartition(".")[0], []).extend(places.values())
        found: dict[str, list[Held]] = {}  # by fingerprint
        for name, places in groups.items():
            for fingerprint, parts in places.items():
                names, first = dict.fromkeys(sorted(parts), name), min(parts)
                if not parts[first].constant:
                    # A tied tensor has another name on another stage.
                    twins = found.setdefault(fingerprint, [])
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
        """Return the least and the greatest norm of full tensors by step; these differ if tensors are open."""
        squares = self.squares * counted
        greatest, smallest = squares.amax(2), torch.where(counted, self.squares, math.inf).amin(2).nan_to_num(0.0, 0.0)
        least = torch.where(self.open, smallest, greatest).sum(1).sqrt()
        return least, torch.where(self.open, squares.sum(2), greatest).sum(1).sqrt()

    def forms(self, counted: Tensor, line: Sequence[int]) -> dict[str, Tensor]:
        """Return the norms by step that a loop may compute from the ranks of `line`, by the form of the sum."""
        squares = (self.squares * counted)[:, :, list(line)]
        rank_squares = squares.sum(1)
        once = torch.where(self.open, squares.sum(2), squares.amax(2)).sum(1)
        sums = (
            once.sqrt(),
            rank_squares.sum(1).sqrt(),
            rank_squares.mean(1).sqrt(),
            rank_squares.sqrt().sum(1),
            rank_squares.sqrt().mean(1),
        )
        return dict(zip(FORMS, sums, strict=True))


Line = Callable[[int], tuple[int, ...]]
"""line(rank): the ranks of the sum on this rank."""


def lines_of(num_ranks: int) -> Iterator[Line]:
    """Yield the groups of ranks of a loop's possible sums: all ranks, one rank, then every size and distance."""
    shapes = [(size, stride) for size in range(2, num_ranks) if num_ranks % size == 0
              for stride in range(1, num_ranks) if num_ranks % (size * stride) == 0]  # fmt: skip
    for size, stride in [(num_ranks, 1), *([(1, 1)] if num_ranks > 1 else []), *shapes]:

        def line(rank: int, size: int = size, stride: int = stride) -> tuple[int, ...]:
            start = rank - rank // stride % size * stride
            return tuple(start + index * stride for index in range(size))

        yield line


@dataclass(frozen=True)
class Explanation:
    """The sum that gives a loop's norm."""

    lacks: Pairs
    """Parts that the sum leaves out."""
    extra: Pairs
    """Parts that the sum counts but should not."""
    line: Line
    """The ranks of the sum."""
    form: str
    """The form of the sum (`FORMS`)."""


class Scope:
    """One clipping of each step.

    Attributes:
        used: [steps, ranks], the loop's norm; NaN if a rank clips nothing.
        wanted: [steps, tensors, ranks], the parts that the clipping should scale.
        passed: [steps, tensors, ranks], the parts that the clipping scales.
    """

    def __init__(self, table: Table, index: int, clips: list[list[list[Clip]]], alone: bool) -> None:
        self.table = table
        self.clips = [{rank: rank_clips[index] for rank, rank_clips in enumerate(step) if rank_clips} for step in clips]
        self.max_norm = next(clip.max_norm for step in self.clips for clip in step.values())
        self.used = torch.full((len(clips), table.num_ranks), math.nan, dtype=torch.float64)
        for t, step in enumerate(self.clips):
            for rank, clip in step.items():
                self.used[t, rank] = clip.total
        every = {name for step in self.clips for clip in step.values() for name in clip.names}
        counted = table.table(lambda t, rank, name, shard: float(alone or name in every)) > 0
        self.wanted = table.trained & counted
        self.passed = (
            table.table(lambda t, r, name, _: float(r in self.clips[t] and name in self.clips[t][r].names)) > 0
        )
        self.lacks = self.pairs(self.wanted & ~self.passed)
        self.extra = self.pairs(self.passed & ~table.trained)
        # torch's EPSILON also makes scaled gradients smaller than max_norm.
        self.slack = table.tolerance + (2 * EPSILON / self.max_norm if table.hand else 0.0)

    def pairs(self, mask: Tensor) -> Pairs:
        """Return the ranks and names in a mask with a gradient in any step."""
        some = (mask & (self.table.squares > 0)).any(0).nonzero().tolist()
        return tuple((rank, self.table.held[h].names[rank]) for h, rank in some)

    def is_full(self) -> bool:
        """Return True if the loop's norm is the full norm on every rank in every step."""
        least, most = self.table.full(self.wanted)
        if self.table.hand:
            if bool((least > self.max_norm * (1 + self.table.tolerance)).any()):
                return False
            return self.is_reached() or self.explanation() is None
        low, high = least[:, None] * (1 - self.slack), most[:, None] * (1 + self.slack)
        return bool((((self.used >= low) & (self.used <= high)) | self.used.isnan()).all())

    def is_reached(self) -> bool:
        """Return True if the full norm is at least max_norm in any step."""
        return bool((self.table.full(self.wanted)[1] >= self.max_norm * (1 - self.slack)).any())

    def distance(self, values: Tensor) -> float:
        """Return the greatest relative error of `values` [steps, ranks] to the loop's norms; infinite if not equal."""
        errors = (values / self.used - 1).nan_to_num(0.0, math.inf, math.inf)
        if not self.table.hand:
            return found if (found := float(errors.abs().max())) <= self.table.tolerance else math.inf
        # A norm below max_norm scales nothing. One rank in every step must reach max_norm, to exclude coincidences.
        short = -float(errors.amax(1).min())
        return abs(short) if short <= self.slack and float(errors.max()) <= self.table.tolerance else math.inf

    def explanation(self) -> Explanation | None:
        """Return the sum that gives the loop's norms with the smallest error; of equal sums the simplest."""
        counts: list[tuple[Tensor, Pairs, Pairs]] = [(self.wanted, (), ())]
        if self.lacks or self.extra:
            counts.append((self.passed, self.lacks, self.extra))
        # No rank counts sharded tensors, or a module of one name; or only one rank does, as if others had copies.
        held = self.table.held
        cut = torch.tensor([each.open or len(each.names) < self.table.num_ranks for each in held])[:, None]
        names = {name for each in held for name in each.names.values()}
        masks = [cut]
        for word in sorted({word for name in names for word in name.split(".") if not word.isdigit()}):
            masks.append(self.table.table(lambda t, rank, name, _, word=word: float(word in name.split("."))) > 0)  # type: ignore[misc]
        # The first rank with a tensor of this name, without the numbers of layers and experts.
        lowest: dict[str, int] = {}
        for rank, name in self.pairs(self.wanted):
            pattern = re.sub(r"\d+", "", name)
            lowest[pattern] = min(rank, lowest.get(pattern, rank))
        others = cut & (
            self.table.table(lambda t, rank, name, _: float(rank > lowest.get(re.sub(r"\d+", "", name), rank))) > 0
        )
        for mask in [some for whole in masks for some in (whole, whole & others)]:
            counts.append((self.wanted & ~mask, self.pairs(self.wanted & mask), ()))
        ranks, lines = range(self.table.num_ranks), list(lines_of(self.table.num_ranks))
        found: list[tuple[float, Explanation]] = []
        for counted, lacks, extra in counts:
            sums = {group: self.table.forms(counted, group) for line in lines for group in map(line, ranks)}
            # One rank's norm is tried before wrong sums, since after scaling by hand every rank has the same.
            for form, line in product(FORMS, lines):
                distance = self.distance(torch.stack([sums[line(rank)][form] for rank in ranks], 1))
                found.append((distance, Explanation(lacks, extra, line, form)))
        least = min(distance for distance, _ in found)
        near = 2 * least + self.table.tolerance / 100  # equal sums differ only by rounding
        return next(each for distance, each in found if distance <= near) if least < math.inf else None
