"""The kind and the place of a mistake that shows in gradients alone: all outputs of the first step are right.

A gradient is held against what mistakes would make of it: the reference's times the size of an axis, one rank's term,
the mean of the ranks' means, terms that were clipped before they were added. The reference has computed each rank's
share of the data alone as well, so these are numbers and no guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parity.compare import axis_words, factor_of, relative_error
from meshwright.parity.explain import PARTIAL, groups_over
from meshwright.parity.judge import Evidence, ModuleLine
from meshwright.parity.parts import Part
from meshwright.parity.record import LOCAL

LOOSE = 64.0
"""A hypothesis on what a wrong tensor is holds within so many times what a right one may be off, where that is less
than a thousandth, and leaves at most a quarter of the error."""


def near(allowed: float) -> float:
    """The relative error within which a hypothesis holds."""
    return max(allowed, min(LOOSE * allowed, 1e-3))


ALL = "(all parameters)"
MOST = 0.9
"""All parameters, but for those whose gradient is nothing but rounding (the bias of a key), are so many at least."""


@dataclass(frozen=True)
class Mistake:
    """`module`: where the mistake is, a path of the reference's; `text`: a sentence for a person."""

    kind: str
    module: str
    text: str


def owner_of(parameter: str) -> str:
    """The module that has a parameter."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True)
class Hypothesis:
    """A kind, and the sentence's end that says what the wrong tensor is."""

    kind: str
    text: str


def is_rounding(evidence: Evidence, error: float) -> bool:
    """Whether an error is about what a narrower type than the model's rounds by."""
    # float32 rounds by 6e-8; a chain of layers adds that up to a few 1e-6. Coarser models cannot tell.
    return evidence.reference.facts.dtype == "float64" and 1e-9 < error < 3e-6


def gradient_finding(evidence: Evidence, wrong: Sequence[str]) -> Mistake:
    """Where and what, of gradients that are wrong in the first step while all outputs are right."""
    hypotheses = {name: hypothesis_of(evidence, name, 1) for name in wrong}
    kinds = {name: h.kind for name, h in hypotheses.items()}
    alike = set(kinds.values())
    trained = [name for name in evidence.names if name not in evidence.reference.facts.dead]
    # What is wrong alike everywhere was done to all gradients at once: by the reduction, the loss or the clipping.
    if len(wrong) >= MOST * len(trained) and len(alike) == 1 and alike & _EVERYWHERE:
        return Mistake(kinds[wrong[0]], ALL, f"the gradient of every parameter is {hypotheses[wrong[0]].text}")
    # Which parameter a second name belongs to is not recorded. A table used twice is a matrix, so that a program in
    # which nothing but matrices called weight is wrong has most likely lost one of two uses.
    if evidence.reference.facts.tied and all(n.endswith("weight") and evidence.weight(n).ndim == 2 for n in wrong):
        name = wrong[0]
        return Mistake(
            "incomplete sum",
            owner_of(name),
            f"{name} is used twice, and its gradient is not the sum of both uses",
        )
    order = [line.name for line in evidence.modules]
    # The backward pass goes from the last module to the first: the last in forward order that is wrong was wrong first.
    unexplained = (line for line in reversed(evidence.modules) if line.gradient and not line.gradient.explained)
    gradient_line = next(unexplained, None)
    module = gradient_line.name if gradient_line else ""

    def place(name: str) -> int:
        owner = owner_of(name)
        return order.index(owner) if owner in order else -1

    # The wrong parameter of the last module: its gradient came first, and those before it may only follow from it.
    nearest = max(wrong, key=place)
    h = hypotheses[nearest]
    owner = owner_of(nearest)
    own_line = next((line for line in evidence.modules if line.name == owner), None)
    partial = own_line is not None and own_line.gradient is not None and own_line.gradient.kind == PARTIAL
    # A partial sum at the parameter's own module is nearer than any wrong gradient behind it.
    if partial:
        assert own_line is not None
        return _backward_finding(evidence, own_line, nearest)
    if gradient_line is not None and (order.index(gradient_line.name) > place(nearest) or module == owner):
        return _backward_finding(evidence, gradient_line, nearest)
    others = f" (and of {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Mistake(h.kind, owner, f"the gradient of {nearest}{others} is {h.text}")


_EVERYWHERE = {
    "scaled",
    "missing reduction",
    "incomplete sum",
    "token counts",
    "clipping",
    "no gradient",
    "accumulated",
    "lower precision",
}
"""Kinds of mistakes that are no module's: what happens to all gradients alike."""


def _backward_finding(evidence: Evidence, line: ModuleLine, parameter: str) -> Mistake:
    """The gradient of a module's output is wrong: its consumer has made it."""
    facts, gradient = evidence.reference.facts, line.gradient
    assert gradient is not None
    lines = evidence.modules
    later = [
        other
        for other in lines[lines.index(line) + 1 :]
        if other.gradient is not None and other.gradient.kind == PARTIAL
    ]
    # A partial sum further back is explained, and yet is the cause of what is unexplained here.
    source = line if gradient.kind == PARTIAL or not later else later[-1]
    maker = facts.consumers.get(source.name) or facts.parents.get(source.name)
    if not maker:  # the model's own code takes the output: for the module, likely, that it calls next
        maker = next((other.name for other in lines[lines.index(source) + 1 :] if other.name), "(loss)")
    gradient = source.gradient
    assert gradient is not None
    if gradient.kind == PARTIAL:
        text = f"the gradient that {maker} gives back to {source.name} is a partial sum over {gradient.axis}"
        text += f", and is taken for the whole: its backward pass lacks an all-reduce (wrong first: {parameter})"
        return Mistake("missing reduction", maker, text)
    if gradient.factor is not None and abs(gradient.factor - 1) > 0.01:
        text = f"the gradient that {maker} gives back to {source.name} is the reference's times {gradient.factor:.4g}"
        return Mistake("scaled", maker, text + axis_words(evidence.sizes, gradient.factor))
    kind = "lower precision" if is_rounding(evidence, gradient.error) else "wrong values"
    text = f"the gradient that {maker} gives back to {source.name or 'the model'} is off by {gradient.error:.1e}"
    return Mistake(kind, maker, f"{text} (allowed: {gradient.allowed:.1e})")


def hypothesis_of(evidence: Evidence, name: str, step: int) -> Hypothesis:
    """The kind of mistake that makes of a parameter's gradient what it is."""
    pieces = list(evidence.pieces("gradient", step, name))
    allowed = near(evidence.allowed("gradient", step, name))
    # Absent and zero are one: wrappers that clear gradients leave either.
    if all(ours is None or not ours.any() for _, _, ours, _ in pieces):
        return Hypothesis("no gradient", "none, or zero everywhere")
    full = [
        (rank, part, torch.zeros_like(theirs) if ours is None else ours, theirs) for rank, part, ours, theirs in pieces
    ]
    # Copies that differ come first: of a gradient that has two values no single factor can be right.
    if (differing := _differing(evidence, full, allowed)) is not None:
        return differing
    if (known := _same_everywhere(evidence, name, step, full, allowed)) is not None:
        return known
    worst = max(relative_error(ours, theirs) for _, _, ours, theirs in full)
    kind = "lower precision" if is_rounding(evidence, worst) else "wrong values"
    return Hypothesis(kind, f"off by {worst:.1e} (allowed: {evidence.allowed('gradient', step, name):.1e})")


Pieces = Sequence[tuple[int, Part, Tensor, Tensor]]


def _differing(evidence: Evidence, full: Pieces, allowed: float) -> Hypothesis | None:
    """Ranks with the same part and different gradients of it: what their sum or mean is."""
    by_part: dict[Part, list[tuple[int, Tensor, Tensor]]] = {}
    for rank, part, ours, theirs in full:
        by_part.setdefault(part, []).append((rank, ours, theirs))
    for part, held in by_part.items():
        if len(held) < 2 or all(relative_error(ours, held[0][1]) <= allowed for _, ours, _ in held):
            continue
        factors = [factor_of(ours, theirs) for _, ours, theirs in held]
        # A factor for each rank and clipping: each divided by the norm of what it alone holds.
        if evidence.reference.facts.clip is not None and all(f is not None for f in factors):
            words = ", ".join(f"{f:.4g}" for f in factors if f is not None)
            return Hypothesis(
                "clipping", f"the reference's times {words} on its ranks: each clips by a norm of its own"
            )
        axes = evidence.axes_of([rank for rank, _, _ in held])
        # One axis after the other, then all: a missing reduction is nearly always over one.
        for axis in (*axes.split("+"), axes):
            group = next(g for g in groups_over(evidence.coordinates, axis.split("+")) if held[0][0] in g)
            terms = [ours for rank, ours, _ in held if rank in group]
            f = factor_of(torch.stack(terms).sum(0), held[0][2]) if len(terms) > 1 else None
            if f is not None:
                times = "" if abs(f - 1) < 0.01 else f" times {f:.4g}"
                text = (
                    f"different on ranks with the same part ({part}): their sum over {axis} is the reference's{times}"
                )
                return Hypothesis("missing reduction", f"{text}, so it was not reduced over {axis}")
        return Hypothesis("missing reduction", f"different over {axes} on ranks that hold the same part ({part})")
    return None


def _same_everywhere(evidence: Evidence, name: str, step: int, full: Pieces, allowed: float) -> Hypothesis | None:
    """One wrong gradient, equal on all of its ranks: a factor, one rank's term, the mean of means, no clipping, ..."""
    facts = evidence.reference.facts
    raw = evidence.reference.get("raw-gradient", step, name)
    alone = [x for side in evidence.ranks if (x := side.get(LOCAL, 1, name)) is not None]

    def equal(whole: Tensor | None) -> bool:
        return whole is not None and all(
            # The second bound: near in bf16 is a third of everything, so a hypothesis must also explain most of the
            # error.
            relative_error(ours, part.take(whole)) <= min(allowed, 0.25 * relative_error(ours, theirs))
            for _, part, ours, theirs in full
        )

    if facts.clip is not None and equal(raw):
        return Hypothesis("clipping", "not clipped")
    if step == 1 and len(alone) > 1:
        # Ranks of one data group have the same share: their equal terms are one term.
        distinct = [x for i, x in enumerate(alone) if not any(torch.equal(x, y) for y in alone[:i])]
        if len(distinct) > 1 and equal(torch.stack(alone).mean(0)):
            return Hypothesis(
                "token counts", "the mean of the ranks' means: right only where all have equal numbers of labels"
            )
        for x in distinct if len(distinct) > 1 else ():
            # A program may have divided by the ranks before the sum that it then left out, or multiplied for it.
            for factor in (1.0, 1 / len(distinct), float(len(distinct))):
                if equal(factor * x):
                    return Hypothesis("incomplete sum", "that of one rank's share of the data alone")
    if step > 1 and _has_earlier(evidence, name, step, full):
        return Hypothesis("accumulated", "a sum with those of the steps before: it was not set to zero in between")
    # Never above 0.3: beyond that anything is a multiple of anything.
    loose = max(1e-3, min(allowed, 0.3))
    factors = [factor_of(ours, theirs, loose) for _, _, ours, theirs in full]
    known = [f for f in factors if f is not None]
    # Parts of one parameter on several ranks must agree on the factor, else it is not one mistake.
    spread = max(1e-2, loose / 2)
    if (
        len(known) == len(factors)
        and max(known) - min(known) <= spread * abs(max(known))
        and abs(known[0] - 1) > spread
    ):
        words = axis_words(evidence.sizes, known[0])
        # A factor that is no axis' size, where gradients are clipped: the ratio of the right norm and another.
        if facts.clip is not None and not words:
            return Hypothesis("clipping", f"the reference's times {known[0]:.4g}: clipped by another norm")
        return Hypothesis("scaled", f"the reference's times {known[0]:.4g}{words}")
    if facts.clip is not None and known and len(known) == len(factors):
        words = ", ".join(sorted({f"{f:.4g}" for f in known}))
        return Hypothesis("clipping", f"the reference's times {words} on its ranks: each clips by a norm of its own")
    if facts.clip is not None and len(alone) > 1:
        return _clipped_first(full, alone, max(1e-3, min(allowed, 0.1)))
    return None


def _clipped_first(full: Pieces, alone: Sequence[Tensor], allowed: float) -> Hypothesis | None:
    """Whether the gradient is a sum of the ranks' own, each with a factor: clipped before they were added."""
    for _, part, ours, _ in full:
        terms = torch.stack([part.take(x).flatten() for x in alone], 1)
        weights = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
        # Free factors: the norm by which each rank has clipped is not known here.
        if relative_error((terms @ weights).view_as(ours), ours) > allowed:
            return None
    return Hypothesis(
        "clipping", "a sum of the ranks' own with factors that differ: each was clipped before they were added"
    )


def _has_earlier(evidence: Evidence, name: str, step: int, full: Pieces) -> bool:
    """Whether the gradient is the right one and multiples of those of earlier steps."""
    steps = [x for k in range(1, step + 1) if (x := evidence.reference.get("gradient", k, name)) is not None]
    for _, part, ours, _ in full:
        terms = torch.stack([part.take(x).flatten() for x in steps], 1)
        weights = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
        fits = relative_error((terms @ weights).view_as(ours), ours) < 1e-2
        # This step's gradient once, and at least a tenth of an earlier one, or it is rounding that the fit has used up.
        if not fits or abs(float(weights[-1]) - 1) > 1e-2 or float(weights[:-1].abs().max()) < 0.1:
            return False
    return True
