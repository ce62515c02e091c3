"""Reads the records of a check's ranks and explains modules' tensors, for the search of the first mistake (kinds.py).

The search follows cause and effect: a rank's inputs (weights, data), outputs of modules in forward order, losses,
gradients in backward order, then effects of later steps: the optimizer, stale weights, unequal counts, dropout. The
first mistake is the finding; the consequences are in the rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.parity.batches import COMPARED_STEPS
from meshwright.parity.compare import factor_of, relative_error
from meshwright.parity.explain import Explanation, explain_tensors, fit
from meshwright.parity.parts import Part, missing_places
from meshwright.parity.record import PARALLEL, PASSES, REFERENCE, PartFacts, ReferenceFacts, SideRecord
from meshwright.parity.reference import MARGIN


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread in a context: for a check's small tensors, starting threads takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class ModuleLine:
    """One call of a module: explanations of the ranks' traced output, output gradient and input."""

    name: str
    type: str
    output: Explanation | None
    gradient: Explanation | None
    input: Explanation | None = None
    call: int = 0


class Evidence:
    """The records of both sides of a comparison, in one folder, or with the reference's in another.

    Attributes:
        names: The reference's parameters.
        unequal_step: The step with unequal numbers of labels in the rows of the batch; 0 if there is none.
        coordinates: Each rank's index on every axis.
        sizes: The number of ranks on each axis.
        parts: Each rank's parameters as parts of the reference's.
        holders: By the reference's parameter, (rank, the rank's name, part).
        modules: The modules of the first step, if traced and set by the caller.
    """

    def __init__(self, folder: Path, num_ranks: int, reference: Path | None = None) -> None:
        self.ranks = [SideRecord(folder, f"{PARALLEL}-{rank}", PartFacts) for rank in range(num_ranks)]
        self.reference = SideRecord(reference or folder, REFERENCE, ReferenceFacts)
        facts = self.reference.facts
        self.names, self.unequal_step = facts.names, len(facts.losses) if facts.unequal else 0
        self.coordinates = [rank.facts.coordinates for rank in self.ranks]
        self.sizes = {axis: len({indices[axis] for indices in self.coordinates}) for axis in self.coordinates[0]}
        self.parts = [{n: Part.from_json(tree) for n, tree in rank.facts.parts.items()} for rank in self.ranks]
        self.holders: defaultdict[str, list[tuple[int, str, Part]]] = defaultdict(list)
        for holder, parts in enumerate(self.parts):
            for local_name, shard in parts.items():
                self.holders[shard.name].append((holder, local_name, shard))
        self.modules: list[ModuleLine] = []
        self._moved = {(quantity, step, name): value for quantity, step, name, value in facts.moved}

    def allowed(self, quantity: str, step: int, name: str) -> float:
        """Return the stated error of a quantity; else MARGIN times the change by one rounding (at least one unit)."""
        facts = self.reference.facts
        if (stated := facts.stated.get(quantity.partition(":")[0])) is not None:
            return stated
        # A tensor that perturbed runs did not move may still round: at least one unit of its dtype.
        eps = torch.finfo(vars(torch)[facts.dtype]).eps
        return MARGIN * max(self._moved.get((quantity, step, name), 0.0), eps)

    def locals_of(self, quantity: str, line: ModuleLine, at: str = "") -> list[Tensor] | None:
        """Return all ranks' tensors of a module's call; None unless all ranks have one, of equal shapes."""
        calls = self.reference.num_calls(line.name)
        held = [side.call(quantity, line.name, line.call, calls, at=at) for side in self.ranks]
        tensors = [x for x in held if x is not None]
        return tensors if len(tensors) == len(held) and len({x.shape for x in tensors}) == 1 else None

    @cached_property
    def missing(self) -> dict[str, int]:
        """The number of elements of each parameter that no rank holds. Cached, since every step reads it."""
        held = {name: [shard for _, _, shard in self.holders[name]] for name in self.names}
        return {name: missing_places(parts, self.weight(name).shape) for name, parts in held.items()}

    def pieces(self, quantity: str, step: int, name: str) -> Iterator[tuple[int, Part, Tensor | None, Tensor]]:
        """Yield (rank, part, the rank's tensor, the reference's values) for all non-empty parts of a parameter."""
        whole = self.reference.get(quantity, step, name)
        for rank, local_name, shard in self.holders[name]:
            # The reference has no gradient: the program must have none either, or zeros.
            if whole is None:
                whole = torch.zeros_like(self.weight(name))
            theirs = shard.take(whole)
            if theirs.numel():
                yield rank, shard, self.ranks[rank].get(quantity, step, local_name), theirs

    def trained(self, step: int = 1) -> list[str]:
        """Return the trained parameters with gradients of more than rounding in a step (unlike a key's bias)."""
        facts = self.reference.facts
        still = {*facts.dead, *facts.frozen}
        live = [name for name in self.names if name not in still]
        return [name for name in live if self.allowed("gradient", step, name) < 0.5] or live

    def weight(self, name: str) -> Tensor:
        """Return the reference's first value of a parameter, in float64."""
        x = self.reference.get("initial", 0, name)
        assert x is not None, name
        return x

    def replicas_differ(self, quantity: str, step: int, name: str) -> bool:
        """Return True if ranks with the same part of a parameter have different values."""
        first: dict[Part, Tensor] = {}
        return any(
            relative_error(x, first.setdefault(shard, x)) > self.allowed(quantity, min(step, COMPARED_STEPS), name)
            for rank, local_name, shard in self.holders[name]
            if (x := self.ranks[rank].get(quantity, step, local_name)) is not None
        )


def explain_modules(evidence: Evidence, at: str = "") -> list[ModuleLine]:
    """Explain every call of a module of the reference that some rank made, in the order of ending forward passes.

    `at`: the suffix of the traced pass.
    """
    facts = evidence.reference.facts
    called = [{name for name, _ in facts.order if side.num_calls(name, at)} for side in evidence.ranks]
    every = [name for name, _ in facts.order if name]
    leaves = [name for name in every if not any(inner.startswith(f"{name}.") for inner in every)]
    # Ranks that called different modules are stages of a pipeline if some ranks did not call the first or last module.
    # Ranks with different experts are no stages.
    staged = any(names != called[0] for names in called) and not all({*leaves[:1], *leaves[-1:]} <= n for n in called)
    # In a pipeline each stage is named as the model, and several calls of a module cannot be told from each other.
    several = {name for name, call in facts.order if call}
    order = [(name, call) for name, call in facts.order if not staged or (name and name not in several)]
    # Gradients inside of the model are compared up to the scale of a rank's loss, which a later reduction may undo.
    factors = {rank: _loss_factor(evidence, side, order, at) for rank, side in enumerate(evidence.ranks)}
    lines = []
    for name, call in order:
        output = _explain(evidence, "output", name, call, {}, at)
        if output is not None:
            gradient = _explain(evidence, "output-gradient", name, call, factors, at)
            taken = _explain(evidence, "input", name, call, {}, at)
            lines.append(ModuleLine(name, facts.classes.get(name, ""), output, gradient, taken, call))
    return lines


def _routed(evidence: Evidence, name: str, call: int, calls: int) -> bool:
    """Return True if a router sends rows to a module: the number of rows differs in step 2, or zeros pad the rows."""
    side = evidence.reference
    first, second = (side.call("input", name, call, calls, at=at) for at in ("", PASSES[2]))
    if first is None or first.ndim < 2:
        return False
    rows = first.flatten(0, -2)
    return (second is not None and second.shape != first.shape) or bool((rows == 0).all(1).any())


def _used_rows(side: SideRecord[Any], x: Tensor, reading: Sequence[Any], at: str) -> Tensor:
    """Return the rows of a routed module's tensor with a gradient of the output: no padding and no dropped rows."""
    name, call, calls, *rest = reading
    skip, once = rest or (0, True)
    gradient = side.call("output-gradient", name, call, calls, skip, once, at)
    rows = x.flatten(0, -2)
    if gradient is None or gradient.shape[:-1] != x.shape[:-1]:
        return rows
    return rows[(gradient.flatten(0, -2) != 0).any(1)]


def _explain(
    evidence: Evidence, quantity: str, name: str, call: int, factors: Mapping[int, float], at: str
) -> Explanation | None:
    """Explain a module's tensor by several readings; returns the first that explains it, else the first reading.

    A pipeline's stage may be called once more at the beginning, to infer shapes. Equal tensors of microbatches may be a
    table, or rows that are equal by chance. An output without a gradient is unused: a pooler reads the first token of
    each rank's part of the sequence, and only the first rank's is used. Rows from a router have any order, and some are
    padding.
    """
    calls = evidence.reference.num_calls(name)
    whole = evidence.reference.call(quantity, name, call, calls, at=at)
    step = next((step for step, mark in PASSES.items() if mark == at), 1)
    routed = _routed(evidence, name, call, calls)
    used_whole = whole
    if routed and whole is not None and whole.ndim > 1:
        used_whole = _used_rows(evidence.reference, whole, (name, call, calls), at)
    first: Explanation | None = None
    undealt: Explanation | None = None
    # The simplest reading is first; if no reading explains the tensors, the error of the first is reported. All rows
    # are read before the rows with a gradient: a zero row is no padding if no rows were dealt, and wrong gradients have
    # other zero rows.
    several = any(side.num_calls(name, at) > calls for side in evidence.ranks)
    for dealt, dim, skip, once in product(
        (False, True) if routed else (False,), (0, 1) if several else (0,), (0, calls), (True, False)
    ):
        every = {
            rank: side.call(quantity, name, call, calls, skip, once, at, dim)
            for rank, side in enumerate(evidence.ranks)
        }
        held = {rank: x for rank, x in every.items() if x is not None and x.numel()}  # some ranks may have no rows
        scaled = {rank: x / factors.get(rank, 1.0) for rank, x in held.items()}
        theirs = used_whole if dealt else whole
        if dealt:
            reading = (name, call, calls, skip, once)
            scaled = {rank: rows for rank, x in scaled.items() if x.ndim > 1
                      and (rows := _used_rows(evidence.ranks[rank], x, reading, at)).numel()}  # fmt: skip
        if theirs is None or theirs.ndim == 0:  # a loss is compared as a number
            return None
        if not scaled:
            return first or (undealt if theirs.numel() else None)
        used = {rank: x for rank, x in scaled.items() if not evidence.ranks[rank].unused(name, at)}
        for tensors in (scaled, used) if 0 < len(used) < len(scaled) else (scaled,):
            allowed = evidence.allowed(quantity, step, name)
            # Equal tensors are no terms of an output's sum, but may be terms of a gradient: losses divided by ranks.
            explanation = explain_tensors(
                tensors, theirs, allowed, evidence.coordinates, any_order=dealt, equal_terms=quantity != "output"
            )
            if explanation.explained:
                return explanation
            # Rows that a router did not send do not show that a rank lacks a part of a weight.
            explanation = replace(explanation, leaves_out=explanation.leaves_out and not routed)
            if dealt is not routed:
                undealt = undealt or explanation
            # A reading with another shape says less than a reading with an error.
            elif first is None or (math.isinf(first.error) and not math.isinf(explanation.error)):
                first = explanation
    return first


def _loss_factor(evidence: Evidence, side: SideRecord[PartFacts], order: Sequence[tuple[str, int]], at: str) -> float:
    """Return the scale of a rank's loss, from the last module's gradient; e.g. for a mean over the rank's share."""
    quantity = f"output-gradient{at}"
    # A model that returns its loss gives no rows: the gradient there is 1 for any share.
    last = next(
        (name for name, _ in reversed(order) if (x := side.get(quantity, 0, name)) is not None and x.ndim), None
    )
    if last is None:
        return 1.0
    calls, allowed = evidence.reference.num_calls(last), evidence.allowed("output-gradient", 1, last)
    whole = evidence.reference.call("output-gradient", last, calls - 1, calls, at=at)
    # Whole numbers first: losses are divided by ranks and microbatches, and a fitted factor is never exact.
    counts = [float(n) for n in range(1, max(8, len(evidence.ranks)) + 1)]
    for ours in (side.call("output-gradient", last, calls - 1, calls, skip, at=at) for skip in (0, calls)):
        if whole is not None and ours is not None and bool(ours.any()):
            fits = ((factor, fit(ours / factor, whole, allowed)) for n in counts for factor in (n, 1 / n))
            # Lazy: the first factor that fits, mostly 1, ends the search.
            exact = (factor for factor, found in fits if found is not None and found.error <= allowed)
            found = fit(ours, whole, 0.0)
            if factor := next(exact, None) or (None if found is None else factor_of(ours, found.piece)):
                return factor
    return 1.0
