"""Finds the kind and the place of a mistake that is visible only in gradients: all outputs of the first step are right.

A gradient is compared with the results of known mistakes: the reference times an axis's size, one rank's term, the mean
of ranks' means, terms clipped before the sum. These results are computed, not guessed: the reference has also computed
the gradients of each rank's share of the data alone.
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
"""A hypothesis explains a wrong gradient if the hypothesis reproduces it within 64 times the allowed error (at most
1e-3), and removes at least 75 % of the error."""


def near(allowed: float) -> float:
    """Return the largest relative error with which a hypothesis holds."""
    return max(allowed, min(LOOSE * allowed, 1e-3))


ALL = "(all parameters)"
MOST = 0.9
"""The least share of trained parameters that counts as all. Gradients of only rounding (a key's bias) may be right."""


@dataclass(frozen=True)
class Mistake:
    """A mistake of a program. `module`: the place, as a path in the reference; `text`: a sentence for people."""

    kind: str
    module: str
    text: str


OF_SHARES = "the mean of what each rank's share gives alone"
"""The text for a gradient that is the mean of right terms, each computed from one rank's samples."""

MODEL = "(the model)"
"""The place of a mistake in the code of the top-level model, which has no path."""


def owner_of(parameter: str) -> str:
    """Return the path of a parameter's module; empty for a parameter of the top-level model."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True)
class Hypothesis:
    """An explanation of a wrong tensor."""

    kind: str
    text: str
    """The end of a sentence that begins with "the gradient is"."""
    module: str = ""
    """The place, if known."""


@dataclass(frozen=True)
class GradientStep:
    """The gradients of one step."""

    step: int
    kind: str
    """The kind of the gradients in the records."""
    lines: Sequence[ModuleLine]
    """The calls of modules in the step."""


def gradient_finding(evidence: Evidence, wrong: Sequence[str], seen: GradientStep) -> Mistake:
    """Return the mistake that explains wrong gradients of a step with right outputs."""
    scales: Mapping[int, float] = {}
    if evidence.reference.facts.clip is not None:
        causes, scales = _before_clipping(evidence, wrong, seen)
        if (thawed := _thawed(evidence, seen, scales)) is not None and not causes:
            return thawed
        # Without causes, the norm alone explains the wrong gradients.
        wrong, scales = (causes, scales) if causes else (wrong, {})
    hypotheses = {name: hypothesis_of(evidence, name, seen.step, seen.kind, scales) for name in wrong}
    kinds = {name: h.kind for name, h in hypotheses.items()}
    facts = evidence.reference.facts
    trained = evidence.trained(seen.step)
    # A gradient of only rounding on the reference proves nothing.
    alike = {kinds[name] for name in wrong if name in trained} or set(kinds.values())
    # An equal mistake in all gradients was made for all at once: by the reduction, the loss or the clipping.
    if len(wrong) >= MOST * len(trained) and len(alike) == 1 and alike & _EVERYWHERE:
        first = hypotheses[wrong[0]]
        return Mistake(first.kind, first.module or ALL, f"the gradient of every parameter is {first.text}")
    # The record does not say to which parameter a second name belongs. A table with two uses is a matrix. So if only
    # matrices named weight are wrong, the program has most likely lost one of two uses.
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
    # The wrong parameter of the last module has the first gradient; wrong gradients of earlier modules may follow.
    nearest = max(wrong, key=lambda name: places[name])
    h = hypotheses[nearest]
    owner = owner_of(nearest)
    own_line = next((line for line in seen.lines if line.name == owner), None)
    partial = own_line is not None and own_line.gradient is not None and own_line.gradient.kind == PARTIAL
    # A partial sum at the parameter's module is nearer than any wrong gradient of later modules. But a gradient that is
    # equal on all ranks was reduced afterwards, and then e.g. divided once too often.
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
    """Separate gradients that were wrong before clipping from gradients that only have a wrong clipping factor.

    A wrong gradient changes the norm, and with the norm all other gradients, by one factor per rank. The factor of most
    gradients is the norm's. A gradient with another factor, or without one, was wrong before clipping. If most
    gradients have no factor, nothing is known.

    Returns:
        (names of gradients that were wrong before clipping, each rank's clipping factor relative to the reference's).
    """
    factors: dict[int, list[tuple[str, float | None, float]]] = {}  # by rank: (name, factor, accuracy of the factor)
    for name in evidence.trained(seen.step):
        exact = max(1e-6, evidence.allowed("gradient", seen.step, name))
        raw = evidence.reference.get("raw-gradient", seen.step, name)
        for rank, shard, ours, theirs in evidence.pieces(seen.kind, seen.step, name):
            allowed = near(evidence.allowed("gradient", seen.step, name))
            if ours is not None and raw is not None and relative_error(ours, shard.take(raw)) <= allowed:
                return [], {}  # not clipped: no consequence of a norm
            factor = None if ours is None else factor_of(ours, theirs, allowed)
            factors.setdefault(rank, []).append((name, factor, exact))
    scales: dict[int, float] = {}
    causes = set[str]()
    for rank, known in factors.items():
        found = [(f, exact) for _, f, exact in known if f is not None and f > 0]
        groups = [[g for g, accuracy in found if abs(g - f) <= max(exact, accuracy) * f] for f, exact in found]
        largest = max(groups, key=len, default=[])
        if not largest or 2 * len(largest) < len(found):
            return [], {}
        scales[rank] = norm = sorted(largest)[len(largest) // 2]
        causes |= {name for name, f, exact in known if f is None or abs(f - norm) > 2 * exact * norm}
    return [name for name in wrong if name in causes], scales


def _thawed(evidence: Evidence, seen: GradientStep, scales: Mapping[int, float]) -> Mistake | None:
    """Find a frozen parameter with a gradient that was counted in the norm for clipping.

    The norm is then the root of the sum of squares of the reference's norm and the norm of this gradient.
    """
    facts = evidence.reference.facts
    clip, norm = facts.clip, facts.norms[seen.step - 1]
    if not scales or clip is None or norm <= clip or max(scales.values()) - min(scales.values()) > 1e-6:
        return None
    scale = next(iter(scales.values()))
    entered = {}
    for name in facts.frozen:
        first: dict[Part, float] = {}
        for _, shard, ours, _ in evidence.pieces(seen.kind, seen.step, name):
            first.setdefault(shard, 0.0 if ours is None else float(ours.square().sum()))
        # The size before clipping: recorded gradients are multiplied by clip / norm.
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
"""Kinds of mistakes that affect all gradients equally, so have no module."""


_OF_SUMS = {"token counts", "accumulation", "incomplete sum", "missing reduction"}
"""Kinds of hypotheses that name the exact sum of a gradient. They also explain the gradients of earlier modules."""


def _backward_finding(
    evidence: Evidence, line: ModuleLine, parameter: str, h: Hypothesis, seen: GradientStep
) -> Mistake:  # fmt: skip
    """Return the mistake for a wrong gradient of a module's output, which the consumer of the output computed."""
    facts, gradient, lines = evidence.reference.facts, line.gradient, seen.lines
    assert gradient is not None
    later = [
        module
        for module in lines[lines.index(line) + 1 :]
        if module.gradient is not None and module.gradient.kind == PARTIAL
    ]
    # A partial sum at a later module is explained, but is the cause of the unexplained gradient here.
    source = line if gradient.kind == PARTIAL or not later else later[-1]
    maker = facts.consumers.get(source.name) or facts.parents.get(source.name)
    if not maker:  # the model's code reads the output, most likely for the module called next
        maker = next((module.name for module in lines[lines.index(source) + 1 :] if module.name), "(loss)")
    # A list of modules computes nothing: the code of the enclosing module reads the outputs of listed modules.
    known = {module.name for module in lines}
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
        # No sum of a mixture of partial sums and whole gradients is right, but copies must have equal gradients.
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
    evidence: Evidence, name: str, step: int, quantity: str = "gradient", scales: Mapping[int, float] | None = None
) -> Hypothesis:  # fmt: skip
    """Return the hypothesis that explains a parameter's wrong gradient.

    Args:
        evidence: the records of both sides.
        name: the parameter.
        step: the step of the gradient.
        quantity: the gradient's name in the records.
        scales: each rank's clipping factor relative to the reference's, if known.
    """
    pieces = []
    whole = evidence.reference.get("gradient", step, name)
    for rank, local_name, shard in evidence.holders[name]:
        theirs = shard.take(torch.zeros_like(evidence.weight(name)) if whole is None else whole)
        if theirs.numel():
            ours = evidence.ranks[rank].get(quantity, step, local_name)
            pieces.append((rank, shard, ours if ours is None or not scales else ours / scales.get(rank, 1.0), theirs))
    allowed = near(evidence.allowed("gradient", step, name))
    # Absent and zero gradients are treated as equal: wrappers that clear gradients leave either.
    if all(ours is None or not ours.any() for _, _, ours, _ in pieces):
        return Hypothesis("no gradient", "none, or zero everywhere")
    full = [
        (rank, shard, torch.zeros_like(theirs) if ours is None else ours, theirs)
        for rank, shard, ours, theirs in pieces
    ]
    # Different copies are checked first: no single factor can be right for two different gradients.
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
    """Find ranks with different gradients of the same part, and explain the sum or mean of these."""
    by_part: dict[Part, list[tuple[int, Tensor, Tensor]]] = {}
    for rank, shard, ours, theirs in full:
        by_part.setdefault(shard, []).append((rank, ours, theirs))
    for shard, held in by_part.items():
        if len(held) < 2 or all(relative_error(ours, held[0][1]) <= allowed for _, ours, _ in held):
            continue
        twins = [ours for rank, ours, _ in held if rank == held[0][0]]
        if len(twins) > 1 and relative_error(torch.stack(twins).sum(0), held[0][2]) <= allowed:
            text = (
                f"another for each of its {len(twins)} copies on a rank, and only their sum is the reference's: untied"
            )
            return Hypothesis("incomplete sum", text)
        factors = [factor_of(ours, theirs) for _, ours, theirs in held]
        # One factor per rank, with clipping: each rank divided by the norm of its parts alone.
        if clipped and all(f is not None for f in factors):
            words = ", ".join(f"{f:.4g}" for f in factors if f is not None)
            return Hypothesis(
                "clipping", f"the reference's times {words} on its ranks: each clips by a norm of its own"
            )
        places = [evidence.coordinates[rank] for rank, _, _ in held]
        axes = "+".join(axis for axis in places[0] if len({indices[axis] for indices in places}) > 1)
        # Each axis alone, then all together: a missing reduction is nearly always over one axis.
        for axis in (*axes.split("+"), axes):
            group = next(g for g in groups_over(evidence.coordinates, axis.split("+")) if held[0][0] in g)
            terms = [ours for rank, ours, _ in held if rank in group]
            f = factor_of(torch.stack(terms).sum(0), held[0][2]) if len(terms) > 1 else None
            if f is not None:
                times = "" if abs(f - 1) < 0.01 else f" times {f:.4g}"
                text = (
                    f"different on ranks with the same part ({shard}): their sum over {axis} is the reference's{times}"
                )
                return Hypothesis("missing reduction", f"{text}, so it was not reduced over {axis}")
        return Hypothesis("missing reduction", f"different over {axes} on ranks that hold the same part ({shard})")
    return None


def _of_terms(evidence: Evidence, name: str, full: Pieces, allowed: float) -> Hypothesis | None:
    """Explain the first step's gradient as a sum with missing, doubled or rounded terms.

    The terms are the gradients by rank, by microbatch, by use of the parameter, or by piece of the module's input.
    """
    raw, whole = (evidence.reference.get(quantity, 1, name) for quantity in ("raw-gradient", "gradient"))
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
        # Terms that do not add up to the reference's gradient explain nothing.
        if len(terms) < 2 or relative_error(torch.stack(terms).sum(0), raw) > allowed:
            continue
        found = [weights_of(ours, theirs, [shard.take(x) * clipped for x in terms], allowed)
                 for _, shard, ours, theirs in full if relative_error(ours, theirs) > allowed]  # fmt: skip
        told = {None if w is None else lost_words(w, names) for w in found}
        if len(told) == 1 and (sentence := told.pop()) is not None:
            # A doubled microbatch was reduced or added again together with a later one.
            again = terms is microbatches[1] and sentence[0] == "scaled"
            return Hypothesis("accumulation" if again else sentence[0], sentence[1])
        for each in (terms, [x * len(terms) for x in terms]):
            divided = clipped if each is terms else clipped / len(terms)
            rounded = {
                rounded_sum(ours / divided, [shard.take(x) for x in each], torch.zeros_like(ours), dtype, allowed)
                for _, shard, ours, _ in full
            }
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
    """Return descriptions and gradients of the ranks' microbatches, weighted by the microbatch's share of all labels.

    The shares are solved for by least squares, so that the terms add up to the reference's gradient.
    """
    micro = max((side.facts.micro for side in evidence.ranks), default=1)
    words, terms = list[str](), list[Tensor]()
    for index in range(micro if micro > 1 else 0):
        for rank, side in enumerate(evidence.ranks):
            x = side.get(f"{CHUNK}{micro}:{index}", 1, name)
            # Ranks of one data group have equal microbatches. A microbatch without labels has no term.
            if x is not None and x.any() and not any(torch.equal(x, y) for y in terms):
                words.append(f"microbatch {index + 1} of rank {rank}")
                terms.append(x)
    if len(terms) < 2 or raw.numel() < 2 * len(terms):
        return [], []
    rows = torch.stack([x.flatten() for x in terms], 1)
    shares = torch.linalg.lstsq(rows, raw.flatten()[:, None].to(rows)).solution.flatten().tolist()
    return words, [share * x for share, x in zip(shares, terms, strict=True)]


def _piece_terms(evidence: Evidence, name: str, raw: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the terms of a linear's weight gradient [out, in] by equal pieces of the input [..., in] along each dim."""
    owner = owner_of(name)
    x, dy = (evidence.reference.call(quantity, owner, 0, 1) for quantity in ("input", "output-gradient"))
    if x is None or dy is None or x.ndim != dy.ndim or x.shape[:-1] != dy.shape[:-1] or x.ndim < 2:
        return
    if raw.shape != (dy.shape[-1], x.shape[-1]) or evidence.reference.num_calls(owner) != 1:
        return
    for dim in range(x.ndim - 1):

        def term(piece: slice, dim: int = dim) -> Tensor:
            rows = (x.movedim(dim, 0)[piece].flatten(0, -2), dy.movedim(dim, 0)[piece].flatten(0, -2))
            return rows[1].T @ rows[0]

        for terms in pieces_of(term, x.shape[dim]).values():
            yield dim, terms


def _same_everywhere(
    evidence: Evidence, name: str, step: int, full: Pieces, allowed: float, clipped: bool
) -> Hypothesis | None:  # fmt: skip
    """Explain a wrong gradient that is equal on all ranks: a factor, one rank's term, a mean of means, no clipping."""
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
    # At most 0.3: with a larger tolerance any tensor is a multiple of any other.
    loose = max(1e-3, min(allowed, 0.3))
    factors = [factor_of(ours, theirs, loose) for _, _, ours, theirs in full]
    known = [f for f in factors if f is not None]
    # Parts of one parameter on several ranks must have one factor, else there are several mistakes.
    spread = max(1e-2, loose / 2)
    alike = len(known) == len(factors) and max(known) - min(known) <= spread * abs(max(known))
    if alike and abs(known[0] - 1) > spread:
        words = axis_words(evidence.sizes, known[0])
        # Scaled down so far that the norm was not clipped: a factor of the reference's unclipped gradient.
        unclipped = None if not clipped or raw is None else _multiple(raw, full, loose)
        if not words and unclipped and (words := axis_words(evidence.sizes, unclipped)):
            return Hypothesis("scaled", f"the unclipped reference's times {unclipped:.4g}{words}")
        # With clipping, a factor that is no axis's size is the ratio of the right norm and another norm.
        if clipped and not words:
            return Hypothesis("clipping", f"the reference's times {known[0]:.4g}: clipped by another norm")
        return Hypothesis("scaled", f"the reference's times {known[0]:.4g}{words}")
    if clipped and known and len(known) == len(factors):
        off = max(abs(f - 1) for f in known)
        # torch divides by norm + 1e-6, so clipping leaves a small error of a scaled gradient.
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
    """Return the common factor of all ranks' pieces relative to `whole`, exactly 1 if nearly 1; None without one.

    A hypothesis must also explain most of the error, since the allowed error in bf16 is up to a third.
    """
    factors = []
    for _, shard, ours, theirs in full:
        piece = shard.take(whole)
        f = factor_of(ours, piece, allowed)
        if f is None or relative_error(f * piece, ours) > min(allowed, 0.25 * relative_error(theirs, ours)):
            return None
        factors.append(f)
    if max(factors) - min(factors) > 1e-3 * abs(factors[0]):
        return None
    return 1.0 if abs(factors[0] - 1) < 1e-6 + allowed else factors[0]


def _of_some_terms(evidence: Evidence, name: str, full: Pieces, allowed: float) -> Hypothesis | None:
    """Explain the first step's gradient as the mean of ranks' or microbatches' means, or as one rank's or
    microbatch's term."""
    alone = [x for side in evidence.ranks if (x := side.get(LOCAL, 1, name)) is not None]
    # Ranks of one data group have equal shares, and their equal terms are one term.
    distinct = [x for i, x in enumerate(alone) if not any(torch.equal(x, y) for y in alone[:i])]
    clipped = evidence.reference.facts.clip is not None  # the pieces are then scaled by an unknown number
    raw = evidence.reference.get("raw-gradient", 1, name)

    def is_mean(terms: Sequence[Tensor]) -> bool:
        # If the mean of the terms is the right gradient, the mean explains nothing.
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
        # A program may have divided by the number of ranks, or multiplied, for the sum that is missing.
        for times in (1.0, 1 / len(distinct), float(len(distinct))):
            factor = _multiple(times * x, full, allowed)
            if factor is not None and (clipped or factor == 1.0):
                return Hypothesis("incomplete sum", "that of one rank's share of the data alone")
    micro = max((side.facts.micro for side in evidence.ranks), default=1)
    chunks: list[Tensor] = []
    for index in range(micro if micro > 1 else 0):
        terms = [x for side in evidence.ranks if (x := side.get(f"{CHUNK}{micro}:{index}", 1, name)) is not None]
        if terms:
            chunks.append(torch.stack(terms).mean(0))
    if len(chunks) < micro or not chunks or all(torch.equal(x, chunks[0]) for x in chunks):
        return None
    if is_mean(chunks):
        text = f"the mean of what each of {micro} microbatches gives alone: something in it is of all samples together"
        return Hypothesis("accumulation", text)
    for index, x in enumerate(chunks):
        if _multiple(x, full, allowed) is not None:
            return Hypothesis("incomplete sum", f"that of microbatch {index + 1} of {micro} alone")
    return None


def _clipped_first(full: Pieces, alone: Sequence[Tensor], allowed: float) -> Hypothesis | None:
    """Explain the gradient as a sum of ranks' gradients with a factor each: clipped before the sum."""
    for _, shard, ours, _ in full:
        terms = torch.stack([shard.take(x).flatten() for x in alone], 1)
        weights = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
        # The factors are free, since the norm of each rank's clipping is unknown.
        if relative_error((terms @ weights).view_as(ours), ours) > allowed:
            return None
    return Hypothesis(
        "clipping", "a sum of the ranks' own with factors that differ: each was clipped before they were added"
    )


def _has_earlier(evidence: Evidence, name: str, step: int, full: Pieces) -> bool:
    """Return True if the gradient is the right one plus multiples of earlier steps' gradients (scaled, if clipped)."""
    clipped = evidence.reference.facts.clip is not None
    kinds = ["gradient"] * (step - 1) + ["raw-gradient" if clipped else "gradient"]
    steps = [x for k, quantity in enumerate(kinds, 1) if (x := evidence.reference.get(quantity, k, name)) is not None]
    for _, shard, ours, _ in full:
        terms = torch.stack([shard.take(x).flatten() for x in steps], 1)
        weights = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
        fits = relative_error((terms @ weights).view_as(ours), ours) < 1e-2
        # This step's gradient once, and at least a tenth of an earlier one; a smaller multiple may fit only rounding.
        last, earlier = float(weights[-1]), float(weights[:-1].abs().max())
        once = last > 0 if clipped else abs(last - 1) <= 1e-2
        if not fits or not once or earlier < 0.1 * last:
            return False
    return True
