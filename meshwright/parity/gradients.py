"""The kind and the place of a mistake that shows in gradients alone: all outputs of the first step are right.

A gradient is compared with the results of known mistakes: the reference times an axis's size, one rank's term, the mean
of ranks' means, terms clipped before they were added. These are computed, not guessed: the reference has also run each
rank's share of the data alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parity.compare import NARROW, axis_words, factor_of, narrow_type, relative_error
from meshwright.parity.explain import COPY, PARTIAL, groups_over
from meshwright.parity.judge import Evidence, ModuleLine
from meshwright.parity.parts import Part
from meshwright.parity.record import CHUNK, LOCAL, PASSES, ROUNDED, USE
from meshwright.parity.terms import lost_words, pieces_of, rounded_sum, weights_of

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


OF_SHARES = "the mean of what each rank's share gives alone"
"""The words on a gradient whose terms are right for each rank's samples alone: of other samples as well."""

MODEL = "(the model)"
"""The name of a mistake's place in the top-level model's own code, which has no path."""


def owner_of(parameter: str) -> str:
    """The path of a parameter's module; empty for one of the top-level model's own."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True)
class Hypothesis:
    """A kind, and the sentence's end that says what the wrong tensor is. `module`: the place, where it is known."""

    kind: str
    text: str
    module: str = ""


@dataclass(frozen=True)
class GradientStep:
    """The gradients that are looked at: of which step, kept as which kind, beside which lines of modules."""

    step: int
    kind: str
    lines: Sequence[ModuleLine]


def gradient_finding(evidence: Evidence, wrong: Sequence[str], seen: GradientStep) -> Mistake:
    """The mistake behind wrong gradients of a step whose outputs are all right."""
    scales: Mapping[int, float] = {}
    if evidence.reference.facts.clip is not None:
        causes, scales = _before_clipping(evidence, wrong, seen)
        if (thawed := _thawed(evidence, seen, scales)) is not None and not causes:
            return thawed
        # What is left is explained by the norm alone.
        wrong, scales = (causes, scales) if causes else (wrong, {})
    hypotheses = {name: hypothesis_of(evidence, name, seen.step, seen.kind, scales) for name in wrong}
    kinds = {name: h.kind for name, h in hypotheses.items()}
    facts = evidence.reference.facts
    trained = evidence.trained(seen.step)
    # A gradient that is nothing but rounding on the reference is no witness.
    alike = {kinds[name] for name in wrong if name in trained} or set(kinds.values())
    # What is wrong alike everywhere was done to all gradients at once: by the reduction, the loss or the clipping.
    if len(wrong) >= MOST * len(trained) and len(alike) == 1 and alike & _EVERYWHERE:
        first = hypotheses[wrong[0]]
        return Mistake(first.kind, first.module or ALL, f"the gradient of every parameter is {first.text}")
    # Which parameter a second name belongs to is not recorded. A table used twice is a matrix, so that a program in
    # which nothing but matrices called weight is wrong has most likely lost one of two uses.
    several = (f"{USE}1", seen.step) in evidence.reference.recorded
    if facts.tied and not several and all(n.endswith("weight") and evidence.weight(n).ndim == 2 for n in wrong):
        name = wrong[0]
        text = f"{name} is used twice, and its gradient is not the sum of both uses"
        return Mistake("incomplete sum", owner_of(name), text)
    order = [line.name for line in seen.lines]
    # The backward pass runs from last to first: the last wrong module in forward order was wrong first.
    unexplained = (line for line in reversed(seen.lines) if line.gradient and not line.gradient.explained)
    gradient_line = next(unexplained, None)
    module = gradient_line.name if gradient_line else ""

    places = {name: order.index(owner_of(name)) if owner_of(name) in order else -1 for name in wrong}
    # The wrong parameter of the last module: its gradient came first, and those before it may only follow from it.
    nearest = max(wrong, key=lambda name: places[name])
    h = hypotheses[nearest]
    owner = owner_of(nearest)
    own_line = next((line for line in seen.lines if line.name == owner), None)
    partial = own_line is not None and own_line.gradient is not None and own_line.gradient.kind == PARTIAL
    # A partial sum at the parameter's own module is nearer than any wrong gradient behind it; but a gradient that all
    # ranks have alike was added up since, and divided once too often, say.
    if partial and h.kind not in ("scaled", "accumulated", "clipping"):
        assert own_line is not None
        return _backward_finding(evidence, own_line, nearest, h, seen)
    behind = gradient_line is not None and (order.index(gradient_line.name) > places[nearest] or module == owner)
    if gradient_line is not None and behind and not partial:
        return _backward_finding(evidence, gradient_line, nearest, h, seen)
    others = f" (and of {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Mistake(h.kind, owner, f"the gradient of {nearest}{others} is {h.text}")


def _before_clipping(
    evidence: Evidence, wrong: Sequence[str], seen: GradientStep
) -> tuple[list[str], dict[int, float]]:  # fmt: skip
    """The gradients that were wrong before they were clipped, and by which factor each rank has clipped otherwise.

    A wrong gradient changes the norm, and with it all others by one factor a rank. That of most of them is the norm's;
    a gradient that has another factor, or none, was wrong before. Nothing is known where most have no factor.
    """
    factors: dict[int, list[tuple[str, float | None, float]]] = {}  # by rank: name, factor, how exact it is
    for name in evidence.trained(seen.step):
        exact = max(1e-6, evidence.allowed("gradient", seen.step, name))
        raw = evidence.reference.get("raw-gradient", seen.step, name)
        for rank, part, ours, theirs in evidence.pieces(seen.kind, seen.step, name):
            allowed = near(evidence.allowed("gradient", seen.step, name))
            if ours is not None and raw is not None and relative_error(ours, part.take(raw)) <= allowed:
                return [], {}  # not clipped: no consequence of a norm
            factor = None if ours is None else factor_of(ours, theirs, allowed)
            factors.setdefault(rank, []).append((name, factor, exact))
    scales: dict[int, float] = {}
    causes = set[str]()
    for rank, known in factors.items():
        found = [(f, exact) for _, f, exact in known if f is not None and f > 0]
        groups = [[g for g, other in found if abs(g - f) <= max(exact, other) * f] for f, exact in found]
        largest = max(groups, key=len, default=[])
        if not largest or 2 * len(largest) < len(found):
            return [], {}
        scales[rank] = norm = sorted(largest)[len(largest) // 2]
        causes |= {name for name, f, exact in known if f is None or abs(f - norm) > 2 * exact * norm}
    return [name for name in wrong if name in causes], scales


def _thawed(evidence: Evidence, seen: GradientStep, scales: Mapping[int, float]) -> Mistake | None:
    """A frozen parameter's gradient that has entered the norm by which all others are clipped.

    By definition the norm is then the root of the squares of the reference's norm and that of this gradient.
    """
    facts = evidence.reference.facts
    clip, norm = facts.clip, facts.norms[seen.step - 1]
    if not scales or clip is None or norm <= clip or max(scales.values()) - min(scales.values()) > 1e-6:
        return None
    scale = next(iter(scales.values()))
    entered = {}
    for name in facts.frozen:
        first: dict[Part, float] = {}
        for _, part, ours, _ in evidence.pieces(seen.kind, seen.step, name):
            first.setdefault(part, 0.0 if ours is None else float(ours.square().sum()))
        # As large as before clipping: what is kept was multiplied by clip / norm, as the others were.
        entered[name] = sum(first.values()) * (norm / (clip * scale)) ** 2
    total = math.sqrt(norm**2 + sum(entered.values()))
    if not any(entered.values()) or not math.isclose(norm / total, scale, rel_tol=1e-3):
        return None
    name = max(entered, key=lambda name: entered[name])
    text = f"{name} is frozen on the reference, and its gradient enters the norm by which all others are clipped"
    return Mistake("optimizer", owner_of(name), text)


_EVERYWHERE = {
    "scaled",
    "missing reduction",
    "incomplete sum",
    "token counts",
    "clipping",
    "no gradient",
    "accumulated",
    "accumulation",
    "stale weights",
    "lower precision",
}
"""Kinds of mistakes that hit all gradients alike, so have no module."""


_OF_SUMS = {"token counts", "accumulation", "incomplete sum", "missing reduction"}
"""Kinds of hypotheses that say exactly which sum a gradient is, so that they explain those before it as well."""


def _backward_finding(
    evidence: Evidence, line: ModuleLine, parameter: str, h: Hypothesis, seen: GradientStep
) -> Mistake:  # fmt: skip
    """The gradient of a module's output is wrong: its consumer has made it."""
    facts, gradient, lines = evidence.reference.facts, line.gradient, seen.lines
    assert gradient is not None
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
    # A list of modules computes nothing: what takes its modules' outputs is the code of the module around it.
    known = {other.name for other in lines}
    while maker and maker != "(loss)" and maker not in known and facts.parents.get(maker):
        maker = facts.parents[maker]
    gradient = source.gradient
    assert gradient is not None
    if gradient.kind == PARTIAL:
        text = f"the gradient that {maker} gives back to {source.name} is a partial sum over {gradient.axis}"
        text += f", and is taken for the whole: its backward pass lacks an all-reduce (wrong first: {parameter})"
        return Mistake("missing reduction", maker, text)
    if gradient.factor is not None and abs(gradient.factor - 1) > 0.01:
        text = f"the gradient that {maker} gives back to {source.name} is the reference's times {gradient.factor:.4g}"
        return Mistake("scaled", maker, text + axis_words(evidence.sizes, gradient.factor))
    at = "" if seen.step == 1 else PASSES[seen.step]
    held = evidence.locals_of("output-gradient", source, at)
    copies = source.output is not None and source.output.kind == COPY
    if copies and held is not None and any(relative_error(x, held[0]) > near(gradient.allowed) for x in held):
        # A mixture of partial sums and of wholes has no sum that is right; but copies have one gradient.
        text = (
            f"the output of {source.name} is the same on all ranks, and the gradient that {maker} gives back to it is "
        )
        return Mistake("missing reduction", maker, f"{text}not: a part of its backward pass lacks an all-reduce")
    text = f"the gradient that {maker} gives back to {source.name or 'the model'} is off by {gradient.error:.1e}"
    text += f" (allowed: {gradient.allowed:.1e})"
    if h.kind in _OF_SUMS:
        return Mistake(h.kind, maker, f"{text}; that of {parameter} is {h.text}")
    return Mistake("lower precision" if h.kind == "lower precision" else "wrong values", maker, text)


def hypothesis_of(
    evidence: Evidence, name: str, step: int, kind: str = "gradient", scales: Mapping[int, float] | None = None
) -> Hypothesis:  # fmt: skip
    """The hypothesis that explains a parameter's wrong gradient. `scales`: by which factor each rank's clipping differs
    from the reference's, where that follows from gradients that were wrong before."""
    pieces = []
    whole = evidence.reference.get("gradient", step, name)
    for rank, own, part in evidence.holders[name]:
        theirs = part.take(torch.zeros_like(evidence.weight(name)) if whole is None else whole)
        if theirs.numel():
            ours = evidence.ranks[rank].get(kind, step, own)
            pieces.append((rank, part, ours if ours is None or not scales else ours / scales.get(rank, 1.0), theirs))
    allowed = near(evidence.allowed("gradient", step, name))
    # Absent and zero gradients count alike: wrappers that clear gradients leave either.
    if all(ours is None or not ours.any() for _, _, ours, _ in pieces):
        return Hypothesis("no gradient", "none, or zero everywhere")
    full = [
        (rank, part, torch.zeros_like(theirs) if ours is None else ours, theirs) for rank, part, ours, theirs in pieces
    ]
    # Copies that differ come first: of a gradient that has two values no single factor can be right.
    clipped = evidence.reference.facts.clip is not None and not scales
    if (differing := _differing(evidence, full, allowed, clipped)) is not None:
        return differing
    if step == 1 and (term := _of_terms(evidence, name, full, allowed)) is not None:
        return term
    if (known := _same_everywhere(evidence, name, step, full, allowed, clipped)) is not None:
        return known
    zero = [rank for rank, _, ours, _ in full if not ours.any()]
    right = all(not ours.any() or relative_error(ours, theirs) <= allowed for _, _, ours, theirs in full)
    if zero and right:
        text = f"zero on rank{'s' if len(zero) > 1 else ''} {', '.join(map(str, zero))}, and right on the others"
        return Hypothesis("no gradient", text)
    worst = max(relative_error(ours, theirs) for _, _, ours, theirs in full)
    off = f"off by {worst:.1e} (allowed: {evidence.allowed('gradient', step, name):.1e})"
    narrow = narrow_type([x for _, _, x, _ in full], [y for _, _, _, y in full], evidence.reference.facts.dtype)
    return Hypothesis("lower precision", f"{off}, as {narrow} rounds") if narrow else Hypothesis("wrong values", off)


Pieces = Sequence[tuple[int, Part, Tensor, Tensor]]


def _differing(evidence: Evidence, full: Pieces, allowed: float, clipped: bool) -> Hypothesis | None:
    """Ranks with the same part and different gradients of it: what their sum or mean is."""
    by_part: dict[Part, list[tuple[int, Tensor, Tensor]]] = {}
    for rank, part, ours, theirs in full:
        by_part.setdefault(part, []).append((rank, ours, theirs))
    for part, held in by_part.items():
        if len(held) < 2 or all(relative_error(ours, held[0][1]) <= allowed for _, ours, _ in held):
            continue
        own = [ours for rank, ours, _ in held if rank == held[0][0]]
        if len(own) > 1 and relative_error(torch.stack(own).sum(0), held[0][2]) <= allowed:
            text = f"another for each of its {len(own)} copies on a rank, and only their sum is the reference's: untied"
            return Hypothesis("incomplete sum", text)
        factors = [factor_of(ours, theirs) for _, ours, theirs in held]
        # A factor for each rank and clipping: each divided by the norm of what it alone holds.
        if clipped and all(f is not None for f in factors):
            words = ", ".join(f"{f:.4g}" for f in factors if f is not None)
            return Hypothesis(
                "clipping", f"the reference's times {words} on its ranks: each clips by a norm of its own"
            )
        places = [evidence.coordinates[rank] for rank, _, _ in held]
        axes = "+".join(axis for axis in places[0] if len({place[axis] for place in places}) > 1)
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


def _of_terms(evidence: Evidence, name: str, full: Pieces, allowed: float) -> Hypothesis | None:
    """The first step's gradient as a sum that lacks terms, has some twice, or whose terms were rounded: terms of ranks,
    of uses of the parameter, of pieces of its module's input."""
    raw, whole = (evidence.reference.get(kind, 1, name) for kind in ("raw-gradient", "gradient"))
    if whole is None:
        return None
    raw = whole if raw is None else raw
    # The reference's clipping multiplies every term by one number.
    size = float(raw.flatten() @ raw.flatten())
    clipped = float(whole.flatten() @ raw.flatten()) / size if size else 1.0
    alone = [x for side in evidence.ranks if (x := side.get(LOCAL, 1, name)) is not None]
    numbers = itertools.takewhile(lambda n: (f"{USE}{n}", 1) in evidence.reference.recorded, itertools.count())
    uses = [x for n in numbers if (x := evidence.reference.get(f"{USE}{n}", 1, name)) is not None]
    sets = [([f"use {n + 1} of {len(uses)} of it" for n in range(len(uses))], uses)]
    # Ranks of one data group have the same share: their equal terms are one term.
    first = [rank for rank, x in enumerate(alone) if not any(torch.equal(x, y) for y in alone[:rank])]
    if len(alone) == len(evidence.ranks):
        sets.append(([f"the term of rank {rank}" for rank in first], [alone[rank] / len(first) for rank in first]))
    sets.append(microbatches := _microbatch_terms(evidence, name, raw))
    for dim, parts in _piece_terms(evidence, name, raw):
        words = [f"piece {n + 1} of {len(parts)} of dim {dim} of its module's input" for n in range(len(parts))]
        sets.append((words, parts))
    dtype = evidence.reference.facts.dtype
    for names, terms in sets:
        # True by construction: the terms are those of the reference's own sum.
        if len(terms) < 2 or relative_error(torch.stack(terms).sum(0), raw) > allowed:
            continue
        found = [weights_of(ours, theirs, [part.take(x) * clipped for x in terms], allowed)
                 for _, part, ours, theirs in full if relative_error(ours, theirs) > allowed]  # fmt: skip
        told = {None if w is None else lost_words(w, names) for w in found}
        if len(told) == 1 and (sentence := told.pop()) is not None:
            # A microbatch that counts twice was reduced or added once more when a later one was.
            again = terms is microbatches[1] and sentence[0] == "scaled"
            return Hypothesis("accumulation" if again else sentence[0], sentence[1])
        for each in (terms, [x * len(terms) for x in terms]):
            divided = clipped if each is terms else clipped / len(terms)
            rounded = {rounded_sum(ours / divided, [part.take(x) for x in each], torch.zeros_like(ours), dtype, allowed)
                       for _, part, ours, _ in full}  # fmt: skip
            if len(rounded) == 1 and (narrow := rounded.pop()):
                text = f"the sum of terms that were rounded to {narrow} before they were added"
                return Hypothesis("lower precision", text)
    for name_of_type, _ in NARROW:
        of_outputs = evidence.reference.get(f"{ROUNDED}{name_of_type}", 1, name)
        if of_outputs is not None and _multiple(of_outputs * clipped, full, allowed) == 1.0:
            text = f"what the model's outputs give once they are rounded to {name_of_type}"
            return Hypothesis("lower precision", text, "(loss)")
    return None


def _microbatch_terms(evidence: Evidence, name: str, raw: Tensor) -> tuple[list[str], list[Tensor]]:
    """The terms that the microbatches of the ranks give. Each is known but for the share of all labels that it has: the
    shares are those that make the reference's sum of the terms."""
    micro = max((side.facts.micro for side in evidence.ranks), default=1)
    words, terms = list[str](), list[Tensor]()
    for number in range(micro if micro > 1 else 0):
        for rank, side in enumerate(evidence.ranks):
            x = side.get(f"{CHUNK}{micro}:{number}", 1, name)
            # Ranks of one data group have the same microbatches; one without labels has no term.
            if x is not None and x.any() and not any(torch.equal(x, y) for y in terms):
                words.append(f"microbatch {number + 1} of rank {rank}")
                terms.append(x)
    if len(terms) < 2 or raw.numel() < 2 * len(terms):
        return [], []
    rows = torch.stack([x.flatten() for x in terms], 1)
    shares = torch.linalg.lstsq(rows, raw.flatten()[:, None].to(rows)).solution.flatten().tolist()
    return words, [share * x for share, x in zip(shares, terms, strict=True)]


def _piece_terms(evidence: Evidence, name: str, raw: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """A linear's weight gradient [out, in] by equal pieces of its input [..., in], along each leading dim."""
    owner = owner_of(name)
    x, dy = (evidence.reference.call(kind, owner, 0, 1) for kind in ("input", "output-gradient"))
    if x is None or dy is None or x.ndim != dy.ndim or x.shape[:-1] != dy.shape[:-1] or x.ndim < 2:
        return
    if raw.shape != (dy.shape[-1], x.shape[-1]) or evidence.reference.num_calls(owner) != 1:
        return
    for dim in range(x.ndim - 1):

        def term(piece: slice, dim: int = dim) -> Tensor:
            own = (x.movedim(dim, 0)[piece].flatten(0, -2), dy.movedim(dim, 0)[piece].flatten(0, -2))
            return own[1].T @ own[0]

        for terms in pieces_of(term, x.shape[dim]).values():
            yield dim, terms


def _same_everywhere(
    evidence: Evidence, name: str, step: int, full: Pieces, allowed: float, clipped: bool
) -> Hypothesis | None:  # fmt: skip
    """One wrong gradient, equal on all of its ranks: a factor, one rank's term, the mean of means, no clipping, ..."""
    raw = evidence.reference.get("raw-gradient", step, name)
    if clipped and raw is not None and _multiple(raw, full, allowed) == 1.0:
        return Hypothesis("clipping", "not clipped")
    if step > 1 and _has_earlier(evidence, name, step, full):
        return Hypothesis("accumulated", "a sum with those of the steps before: it was not set to zero in between")
    before = evidence.reference.get("gradient", step - 1, name) if step > 1 else None
    if before is not None and _multiple(before, full, allowed) == 1.0:
        return Hypothesis("stale weights", "that of the step before")
    if step == 1 and (term := _of_some_terms(evidence, name, full, allowed)) is not None:
        return term
    # Never above 0.3: beyond that anything is a multiple of anything.
    loose = max(1e-3, min(allowed, 0.3))
    factors = [factor_of(ours, theirs, loose) for _, _, ours, theirs in full]
    known = [f for f in factors if f is not None]
    # Parts of one parameter on several ranks must agree on the factor, else it is not one mistake.
    spread = max(1e-2, loose / 2)
    alike = len(known) == len(factors) and max(known) - min(known) <= spread * abs(max(known))
    if alike and abs(known[0] - 1) > spread:
        words = axis_words(evidence.sizes, known[0])
        # Scaled so far that its norm was left unclipped: a factor of the gradient as it was before.
        unclipped = None if not clipped or raw is None else _multiple(raw, full, loose)
        if not words and unclipped and (words := axis_words(evidence.sizes, unclipped)):
            return Hypothesis("scaled", f"the unclipped reference's times {unclipped:.4g}{words}")
        # A factor that is no axis' size, where gradients are clipped: the ratio of the right norm and another.
        if clipped and not words:
            return Hypothesis("clipping", f"the reference's times {known[0]:.4g}: clipped by another norm")
        return Hypothesis("scaled", f"the reference's times {known[0]:.4g}{words}")
    if clipped and known and len(known) == len(factors):
        off = max(abs(f - 1) for f in known)
        # torch adds 1e-6 to the norm that it divides by: of a gradient n times as large so much is left.
        if alike and off < 1e-3:
            return Hypothesis(
                "clipping", f"off by {off:.1e}: what clipping by another norm leaves, of scaled gradients"
            )
        words = ", ".join(sorted({f"{f:.4g}" for f in known}))
        return Hypothesis("clipping", f"the reference's times {words} on its ranks: each clips by a norm of its own")
    alone = [x for side in evidence.ranks if (x := side.get(LOCAL, 1, name)) is not None]
    if clipped and len(alone) > 1:
        return _clipped_first(full, alone, max(1e-3, min(allowed, 0.1)))
    return None


def _multiple(whole: Tensor, full: Pieces, allowed: float) -> float | None:
    """The number that all ranks' pieces are the whole's times, rounded to 1 where it is that; None where there is none.

    The second bound: near in bf16 is a third of everything, so a hypothesis must also explain most of the error.
    """
    factors = []
    for _, part, ours, theirs in full:
        piece = part.take(whole)
        f = factor_of(ours, piece, allowed)
        if f is None or relative_error(f * piece, ours) > min(allowed, 0.25 * relative_error(theirs, ours)):
            return None
        factors.append(f)
    if max(factors) - min(factors) > 1e-3 * abs(factors[0]):
        return None
    return 1.0 if abs(factors[0] - 1) < 1e-6 + allowed else factors[0]


def _of_some_terms(evidence: Evidence, name: str, full: Pieces, allowed: float) -> Hypothesis | None:
    """The gradient of the first step as the mean of ranks' or microbatches' means, or the term of one of these."""
    alone = [x for side in evidence.ranks if (x := side.get(LOCAL, 1, name)) is not None]
    # Ranks of one data group have the same share: their equal terms are one term.
    distinct = [x for i, x in enumerate(alone) if not any(torch.equal(x, y) for y in alone[:i])]
    clipped = evidence.reference.facts.clip is not None  # the pieces are then a whole gradient's times some number
    raw = evidence.reference.get("raw-gradient", 1, name)

    def is_mean(terms: Sequence[Tensor]) -> bool:
        # Where the mean of the terms is the right sum, it explains nothing.
        mean = torch.stack(list(terms)).mean(0)
        if raw is not None and relative_error(mean, raw) <= allowed:
            return False
        factor = _multiple(mean, full, allowed)
        return factor is not None and (clipped or factor == 1.0)

    if len(distinct) > 1 and is_mean(alone):
        counts = [side.facts.counts[0] for side in evidence.ranks if side.facts.counts]
        if len(set(counts)) > 1:
            text = "the mean of the ranks' means: right only where all have equal numbers of labels"
            return Hypothesis("token counts", text)
        text = f"{OF_SHARES}: a statistic of all samples is taken of each rank's own"
        return Hypothesis("missing reduction", text)
    for x in distinct if len(distinct) > 1 else ():
        # A program may have divided by the ranks before the sum that it then left out, or multiplied for it.
        for times in (1.0, 1 / len(distinct), float(len(distinct))):
            factor = _multiple(times * x, full, allowed)
            if factor is not None and (clipped or factor == 1.0):
                return Hypothesis("incomplete sum", "that of one rank's share of the data alone")
    micro = max((side.facts.micro for side in evidence.ranks), default=1)
    chunks: list[Tensor] = []
    for number in range(micro if micro > 1 else 0):
        terms = [x for side in evidence.ranks if (x := side.get(f"{CHUNK}{micro}:{number}", 1, name)) is not None]
        if terms:
            chunks.append(torch.stack(terms).mean(0))
    if len(chunks) < micro or not chunks or all(torch.equal(x, chunks[0]) for x in chunks):
        return None
    if is_mean(chunks):
        text = f"the mean of what each of {micro} microbatches gives alone: something in it is of all samples together"
        return Hypothesis("accumulation", text)
    for number, x in enumerate(chunks):
        if _multiple(x, full, allowed) is not None:
            return Hypothesis("incomplete sum", f"that of microbatch {number + 1} of {micro} alone")
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
    """Whether the gradient is the right one and multiples of those of earlier steps; times a number, if clipped."""
    clipped = evidence.reference.facts.clip is not None
    kinds = ["gradient"] * (step - 1) + ["raw-gradient" if clipped else "gradient"]
    steps = [x for k, kind in enumerate(kinds, 1) if (x := evidence.reference.get(kind, k, name)) is not None]
    for _, part, ours, _ in full:
        terms = torch.stack([part.take(x).flatten() for x in steps], 1)
        weights = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
        fits = relative_error((terms @ weights).view_as(ours), ours) < 1e-2
        # This step's gradient once, and at least a tenth of an earlier one, or it is rounding that the fit has used up.
        last, earlier = float(weights[-1]), float(weights[:-1].abs().max())
        once = last > 0 if clipped else abs(last - 1) <= 1e-2
        if not fits or not once or earlier < 0.1 * last:
            return False
    return True
