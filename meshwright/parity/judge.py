"""Reads what the ranks of a check have left, compares it with the reference, and says what is wrong first, and where.

The order is that of cause and effect: what a rank was given (weights, data), outputs of modules in forward order,
losses, gradients in backward order, then what later steps add: the optimizer, stale weights, unequal counts, dropout.
The first that is wrong is the finding; what follows from it is in the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.parity.compare import Row, factor_of, relative_error
from meshwright.parity.explain import Explanation, explain_tensors, fit
from meshwright.parity.job import PARALLEL, REFERENCE
from meshwright.parity.parts import Part
from meshwright.parity.reference import COMPARED_STEPS, MARGIN


class SideRecord:
    """The file of one side: its facts, and its tensors in float64 by kind, step (or call) and name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        self._file = safe_open(folder / f"{name}.safetensors", "pt")
        self._keys = set(self._file.keys())

    def get(self, kind: str, step: int, name: str) -> Tensor | None:
        key = f"{kind}|{step}|{name}"
        return self._file.get_tensor(key).double() if key in self._keys else None

    def num_calls(self, name: str) -> int:
        """How often a module was called in the traced step of this side."""
        return next(call for call in count() if f"output|{call}|{name}" not in self._keys)

    def call(self, kind: str, name: str, number: int, calls: int, skip: int = 0) -> Tensor | None:
        """A module's tensor in its call `number` of `calls` in a pass over the model, of all microbatches together.

        Microbatches one after the other are the batch. A module that gives the same in each (a table of positions) is
        kept once; the gradients of its outputs are added. `skip`: calls at the beginning that are no microbatch's.
        """
        every = range(self.num_calls(name))
        trained = [n for n in every if f"output-gradient|{n}|{name}" in self._keys]
        numbers = (trained or every)[skip + number :: calls]
        found = [x for n in numbers if (x := self.get(kind, n, name)) is not None]
        if len(found) < 2:
            return found[0] if found else None
        outputs = [x for n in numbers if (x := self.get("output", n, name)) is not None]
        if all(torch.equal(x, outputs[0]) for x in outputs):
            return torch.stack(found).sum(0) if kind == "output-gradient" else found[0]
        alike = found[0].ndim > 0 and len({x.shape[1:] for x in found}) == 1
        return torch.cat(found) if alike else found[0]


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
    """All that a check has left, read once. `coordinates`: each rank's place on every axis."""

    folder: Path
    num_ranks: int
    modules: list[ModuleLine] = field(default_factory=list)

    @cached_property
    def reference(self) -> SideRecord:
        return SideRecord(self.folder, REFERENCE)

    @cached_property
    def ranks(self) -> list[SideRecord]:
        return [SideRecord(self.folder, f"{PARALLEL}-{rank}") for rank in range(self.num_ranks)]

    @cached_property
    def coordinates(self) -> list[dict[str, int]]:
        return [rank.facts["coordinates"] for rank in self.ranks]

    @cached_property
    def parts(self) -> list[dict[str, Part]]:
        """Each rank's parameters as parts of the reference's."""
        return [{n: Part.from_json(tree) for n, tree in rank.facts["parts"].items()} for rank in self.ranks]

    @cached_property
    def _moved(self) -> dict[tuple[str, int, str], float]:
        return {(kind, step, name): value for kind, step, name, value in self.reference.facts["moved"]}

    def allowed(self, kind: str, step: int, name: str) -> float:
        """MARGIN times what one rounding moves, and at least MARGIN roundings."""
        eps = torch.finfo(vars(torch)[self.reference.facts["dtype"]]).eps
        return MARGIN * max(self._moved.get((kind, step, name), 0.0), eps)

    def holders(self, name: str) -> list[tuple[int, str, Part]]:
        """Which ranks hold a part of a parameter of the reference, under which name."""
        return [(rank, own, part) for rank, parts in enumerate(self.parts)
                for own, part in parts.items() if part.name == name]  # fmt: skip

    @property
    def names(self) -> list[str]:
        return list(self.reference.facts["names"])

    def pieces(self, kind: str, step: int, name: str) -> Iterator[tuple[int, Part, Tensor | None, Tensor]]:
        """Rank, part, its tensor and the reference's values, of all parts of a parameter that are not empty."""
        whole = self.reference.get(kind, step, name)
        for rank, own, part in self.holders(name):
            if whole is None:
                whole = torch.zeros_like(self.weight(name))
            theirs = part.take(whole)
            if theirs.numel():
                yield rank, part, self.ranks[rank].get(kind, step, own), theirs

    def weight(self, name: str) -> Tensor:
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
        """How many ranks each axis has."""
        return {axis: len({place[axis] for place in self.coordinates}) for axis in self.coordinates[0]}


def parameter_rows(evidence: Evidence, kind: str, step: int) -> Iterator[Row]:
    """Every parameter's gradient or weight after a step: the worst of its parts, relative to the reference's norm.

    A gradient that no rank keeps is left out (wrappers clear it in their step); one that some ranks lack is off by all.
    """
    kept = any(x is not None for n in evidence.names for _, _, x, _ in evidence.pieces(kind, step, n))
    for name in evidence.names if kept else ():
        whole = evidence.reference.get(kind, step, name)
        size = 0.0 if whole is None else float(torch.linalg.vector_norm(whole))
        worst = 0.0
        for _, _, kept_here, theirs in evidence.pieces(kind, step, name):
            ours = torch.zeros_like(theirs) if kept_here is None else kept_here
            scale = size * math.sqrt(theirs.numel() / max(1, 0 if whole is None else whole.numel()))
            difference = float(torch.linalg.vector_norm(ours - theirs))
            error = difference / scale if scale else difference
            worst = error if not error <= worst else worst
        yield Row(kind, f"{name}, step {step}", worst, evidence.allowed(kind, step, name))


def loss_rows(evidence: Evidence) -> Iterator[Row]:
    """Losses of the steps with equal counts: each rank's own, or the mean or the sum over ranks that have one."""
    facts = evidence.reference.facts
    for step in range(1, COMPARED_STEPS if facts["unequal"] else COMPARED_STEPS + 1):
        theirs = facts["losses"][step - 1]
        ours = [rank.facts["losses"][step - 1] for rank in evidence.ranks]
        ours = [x for x in ours if x == x]
        if not ours:
            continue
        choices = [max(ours, key=lambda x: abs(x - theirs)), sum(ours) / len(ours), sum(ours)]
        error = min(abs(x - theirs) for x in choices) / (abs(theirs) or 1.0)
        yield Row("loss", f"step {step}", error, evidence.allowed("loss", step, ""))


def explain_modules(evidence: Evidence) -> list[ModuleLine]:
    """Every call of a module of the reference that some rank has made, as the forward passes ended."""
    facts = evidence.reference.facts
    called = [{name for name, _ in facts["order"] if side.num_calls(name)} for side in evidence.ranks]
    staged = any(names != called[0] for names in called)  # then each stage of a pipeline is called the model
    order = [(name, call) for name, call in facts["order"] if name or not staged]
    factors = {rank: _loss_factor(evidence, side, order) for rank, side in enumerate(evidence.ranks)}
    lines = []
    for name, call in order:
        output = _explain(evidence, "output", name, call, {})
        if output is not None:
            gradient = _explain(evidence, "output-gradient", name, call, factors)
            taken = _explain(evidence, "input", name, call, {})
            lines.append(ModuleLine(name, facts["classes"].get(name, ""), output, gradient, taken, call))
    return lines


def _explain(evidence: Evidence, kind: str, name: str, number: int, factors: Mapping[int, float]) -> Explanation | None:
    calls = evidence.reference.num_calls(name)
    whole = evidence.reference.call(kind, name, number, calls)
    first: Explanation | None = None
    for skip in (0, calls):  # a pipeline's stage may be called once more, before all, to learn its shapes
        found = {rank: side.call(kind, name, number, calls, skip) for rank, side in enumerate(evidence.ranks)}
        scaled = {rank: x / factors.get(rank, 1.0) for rank, x in found.items() if x is not None}
        if whole is None or not scaled:
            return first
        explanation = explain_tensors(scaled, whole, evidence.allowed(kind, 1, name), evidence.coordinates)
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
    counts = [float(n) for n in range(1, max(8, evidence.num_ranks) + 1)]
    for ours in (side.call("output-gradient", last, calls - 1, calls, skip) for skip in (0, calls)):
        if whole is not None and ours is not None and bool(ours.any()):
            fits = ((factor, fit(ours / factor, whole, allowed)) for n in counts for factor in (n, 1 / n))
            exact = (factor for factor, found in fits if found is not None and found.error <= allowed)
            found = fit(ours, whole, 0.0)
            if factor := next(exact, None) or (None if found is None else factor_of(ours, found.piece)):
                return factor
    return 1.0
