"""Reads what the ranks of a check have left, compares it with the reference, and says what is wrong first, and where.

The order is that of cause and effect: what a rank was given (weights, data), outputs of modules in forward order,
losses, gradients in backward order, then what later steps add: the optimizer, stale weights, unequal counts, dropout.
The first that is wrong is the finding; what follows from it is in the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from meshwright.parity.compare import factor_of, relative_error
from meshwright.parity.explain import Explanation, explain_tensors, fit
from meshwright.parity.parts import Part, missing_places
from meshwright.parity.record import REFERENCE, PartFacts, ReferenceFacts, SideRecord, rank_file
from meshwright.parity.reference import COMPARED_STEPS, MARGIN


@dataclass(frozen=True)
class ModuleLine:
    """A module in forward order: what its outputs and their gradients are on the ranks, where they were traced."""

    name: str
    type: str
    output: Explanation | None
    gradient: Explanation | None
    input: Explanation | None = None
    call: int = 0


@dataclass
class Evidence:
    """All that a comparison's sides have left. `coordinates`: each rank's place on every axis."""

    reference: SideRecord[ReferenceFacts]
    ranks: Sequence[SideRecord[PartFacts]]
    modules: list[ModuleLine] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, num_ranks: int, reference: Path | None = None) -> Evidence:
        """The records of a folder. `reference`: where its record lies, if in another."""
        ranks = [SideRecord(folder, rank_file(rank), PartFacts) for rank in range(num_ranks)]
        return cls(SideRecord(reference or folder, REFERENCE, ReferenceFacts), ranks)

    @cached_property
    def coordinates(self) -> list[dict[str, int]]:
        return [rank.facts.coordinates for rank in self.ranks]

    @cached_property
    def parts(self) -> list[dict[str, Part]]:
        """Each rank's parameters as parts of the reference's."""
        return [{n: Part.from_json(tree) for n, tree in rank.facts.parts.items()} for rank in self.ranks]

    @cached_property
    def _moved(self) -> dict[tuple[str, int, str], float]:
        return {(kind, step, name): value for kind, step, name, value in self.reference.facts.moved}

    def allowed(self, kind: str, step: int, name: str) -> float:
        """The promised error of a kind; else MARGIN times what one rounding moves, and at least MARGIN roundings."""
        facts = self.reference.facts
        if (stated := facts.stated.get(kind.partition(":")[0])) is not None:
            return stated
        # A tensor that the perturbed runs left as it was may still round: one unit of its type at least.
        eps = torch.finfo(vars(torch)[facts.dtype]).eps
        return MARGIN * max(self._moved.get((kind, step, name), 0.0), eps)

    @cached_property
    def _holders(self) -> dict[str, list[tuple[int, str, Part]]]:
        held: dict[str, list[tuple[int, str, Part]]] = {}
        for rank, parts in enumerate(self.parts):
            for own, part in parts.items():
                held.setdefault(part.name, []).append((rank, own, part))
        return held

    def holders(self, name: str) -> list[tuple[int, str, Part]]:
        """Which ranks hold a part of a parameter of the reference, under which name."""
        return self._holders.get(name, [])

    @cached_property
    def missing(self) -> dict[str, int]:
        """How many elements of each parameter are on no rank; read at every step, so counted once."""
        held = {name: [part for _, _, part in self.holders(name)] for name in self.names}
        return {name: missing_places(parts, self.weight(name).shape) for name, parts in held.items()}

    @property
    def names(self) -> list[str]:
        return self.reference.facts.names

    def pieces(self, kind: str, step: int, name: str) -> Iterator[tuple[int, Part, Tensor | None, Tensor]]:
        """Rank, part, its tensor and the reference's values, of all parts of a parameter that are not empty."""
        whole = self.reference.get(kind, step, name)
        for rank, own, part in self.holders(name):
            # The reference has no gradient: the program must have none either, or zeros.
            if whole is None:
                whole = torch.zeros_like(self.weight(name))
            theirs = part.take(whole)
            if theirs.numel():
                yield rank, part, self.ranks[rank].get(kind, step, own), theirs

    def weight(self, name: str) -> Tensor:
        """The reference's first value of a parameter, in float64."""
        x = self.reference.get("initial", 0, name)
        assert x is not None, name
        return x

    def replicas_differ(self, kind: str, step: int, name: str) -> bool:
        """Whether ranks that hold the same part of a parameter have different values of it."""
        first: dict[Part, Tensor] = {}
        return any(
            relative_error(x, first.setdefault(part, x)) > self.allowed(kind, min(step, COMPARED_STEPS), name)
            for rank, own, part in self.holders(name)
            if (x := self.ranks[rank].get(kind, step, own)) is not None
        )

    def axes_of(self, ranks: Sequence[int]) -> str:
        """The axes along which some ranks differ."""
        places = [self.coordinates[rank] for rank in ranks]
        return "+".join(axis for axis in places[0] if len({place[axis] for place in places}) > 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks on each axis."""
        return {axis: len({place[axis] for place in self.coordinates}) for axis in self.coordinates[0]}


def explain_modules(evidence: Evidence) -> list[ModuleLine]:
    """Every call of a module of the reference that some rank has made, as the forward passes ended."""
    facts = evidence.reference.facts
    called = [{name for name, _ in facts.order if side.num_calls(name)} for side in evidence.ranks]
    # Ranks that have called other modules are stages of a pipeline.
    staged = any(names != called[0] for names in called)
    # Each stage of a pipeline is called the model, and of several calls in a pass it makes nobody knows which.
    several = {name for name, call in facts.order if call}
    order = [(name, call) for name, call in facts.order if not staged or (name and name not in several)]
    # Gradients inside of the model are compared up to the scale of a rank's own loss, which a later reduction may undo.
    factors = {rank: _loss_factor(evidence, side, order) for rank, side in enumerate(evidence.ranks)}
    lines = []
    for name, call in order:
        output = _explain(evidence, "output", name, call, {})
        if output is not None:
            gradient = _explain(evidence, "output-gradient", name, call, factors)
            taken = _explain(evidence, "input", name, call, {})
            lines.append(ModuleLine(name, facts.classes.get(name, ""), output, gradient, taken, call))
    return lines


def _explain(evidence: Evidence, kind: str, name: str, number: int, factors: Mapping[int, float]) -> Explanation | None:
    """The explanation of a module's tensor, or the first of several readings that explain nothing.

    A pipeline's stage may be called once more, before all, to learn its shapes. What microbatches give alike may be a
    table, or rows that are equal by chance. Where a rank's output gets no gradient, nobody uses it: a pooler takes the
    first token of each rank's part of the sequence, and that of the first rank alone goes on.
    """
    calls = evidence.reference.num_calls(name)
    whole = evidence.reference.call(kind, name, number, calls)
    first: Explanation | None = None
    # The plainest reading first; its error is reported where none explains the tensors.
    for skip, once in product((0, calls), (True, False)):
        every = {rank: side.call(kind, name, number, calls, skip, once) for rank, side in enumerate(evidence.ranks)}
        held = {rank: x for rank, x in every.items() if x is not None and x.numel()}  # some ranks may have no rows
        scaled = {rank: x / factors.get(rank, 1.0) for rank, x in held.items()}
        if whole is None or whole.ndim == 0 or not scaled:  # a loss is compared as a number
            return first
        used = {rank: x for rank, x in scaled.items() if not evidence.ranks[rank].unused(name)}
        for tensors in (scaled, used) if 0 < len(used) < len(scaled) else (scaled,):
            explanation = explain_tensors(tensors, whole, evidence.allowed(kind, 1, name), evidence.coordinates)
            if explanation.explained:
                return explanation
            first = first or explanation
    return first


def _loss_factor(evidence: Evidence, side: SideRecord, order: Sequence[tuple[str, int]]) -> float:
    """By what a rank's loss is scaled, read off the gradient of its last module: a mean over its own share, say."""
    last = next((name for name, _ in reversed(order) if side.get("output-gradient", 0, name) is not None), None)
    if last is None:
        return 1.0
    calls, allowed = evidence.reference.num_calls(last), evidence.allowed("output-gradient", 1, last)
    whole = evidence.reference.call("output-gradient", last, calls - 1, calls)
    # Whole numbers before any other: losses are divided by ranks and microbatches, and a fit of a factor is never
    # exact.
    counts = [float(n) for n in range(1, max(8, len(evidence.ranks)) + 1)]
    for ours in (side.call("output-gradient", last, calls - 1, calls, skip) for skip in (0, calls)):
        if whole is not None and ours is not None and bool(ours.any()):
            fits = ((factor, fit(ours / factor, whole, allowed)) for n in counts for factor in (n, 1 / n))
            # Lazily: the first that fits ends the search, mostly 1.
            exact = (factor for factor, found in fits if found is not None and found.error <= allowed)
            found = fit(ours, whole, 0.0)
            if factor := next(exact, None) or (None if found is None else factor_of(ours, found.piece)):
                return factor
    return 1.0
