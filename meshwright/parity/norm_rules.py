"""Rules that compare a loop's norm for clipping with the norm of full gradients; each finding is a sentence.

A wrong sum is named only if it gives the loop's norm on every rank, in all steps up to the first that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from meshwright.parity.norm_sums import EPSILON, Clip, Explanation, RankStep, Scope, Table, square


@dataclass(frozen=True)
class NormFinding:
    """A mistake in a loop's clipping.

    `factor`: the full norm divided by the loop's norm, 1 in a right loop; for gradients that are scaled late, the
    scale; for copies that differ, the greatest norm divided by the least.
    """

    kind: str
    module: str
    factor: float
    sentence: str


@dataclass
class Verdict:
    findings: list[NormFinding] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    judged: bool = True


def module_of(table: Table, pairs: Sequence[tuple[int, str]]) -> str:
    """Return the module of the largest of some gradients."""
    sizes = {(r, name): table.squares[0, h, r] for h, held in enumerate(table.held) for r, name in held.names.items()}
    name = max(pairs, key=lambda pair: float(sizes[pair]))[1]
    return name.rpartition(".")[0] or name


def number(x: float | Tensor) -> str:
    return f"{float(x):.4g}"


def by_rank(norms: dict[int, float]) -> str:
    """Return norms as a text: one number if all ranks have it, else the numbers of the first ranks."""
    if max(norms.values()) - min(norms.values()) <= 1e-4 * max(norms.values()):
        return number(next(iter(norms.values())))
    shown = ", ".join(f"{number(norm)} on rank {rank}" for rank, norm in list(norms.items())[:4])
    return shown + (", ..." if len(norms) > 4 else "")


def listed(pairs: Sequence[tuple[int, str]]) -> str:
    """Return names as a text: the first two, and the number of others."""
    names = list(dict.fromkeys(name for _, name in pairs))
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def causes_of(scope: Scope, found: Explanation) -> Iterator[tuple[str, str, str, str]]:
    """Yield (kind, module, cause, remedy) of each part of an explanation."""
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
    """Return the finding on a loop's norm that is not the full norm."""
    table, found = scope.table, scope.explanation()
    full = table.full(scope.wanted)[1]
    ratios = full[:, None] / scope.used
    distance = ratios.log().abs().nan_to_num(0.0, 0.0, 0.0)
    t = int(distance.amax(1).argmax())
    factor = float(ratios[t, int(distance[t].argmax())])
    causes = list(causes_of(scope, found)) if found is not None else [
        ("unexplained", "(all parameters)", "no sum of these gradients gives it",
         "compare the norm that the loop logs with the full one")]  # fmt: skip
    category, module, _, _ = causes[0]
    if table.hand:
        facts = f"clipped gradients have a norm of {number(full[t])} in step {t + 1}, {number(factor)} times max_norm"
    else:
        used = {rank: float(norm) for rank, norm in enumerate(scope.used[t]) if not norm.isnan()}
        facts = f"the loop clips by {by_rank(used)} in step {t + 1}, the full gradients have {number(full[t])}"
        facts += f" ({number(factor)} times as much)"
    whys, remedies = " and ".join(each[2] for each in causes), "; ".join(each[3] for each in causes)
    words = f"{module}: {facts}: {whys}; {remedies}"
    return NormFinding(category, module, factor, words)


def unreduced(table: Table) -> Iterator[NormFinding]:
    """Yield findings on copies with different gradients before clipping: not reduced at all, or only after clipping."""
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
    """Yield a finding if all gradients of all ranks were multiplied by one number between clipping and the step."""
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
    """Merge calls of a step with equal norms: one clipping of several groups of parameters."""
    found: list[Clip] = []
    for clip in clips:
        for index, earlier in enumerate(found):
            if math.isclose(earlier.total, clip.total, rel_tol=1e-6) and earlier.max_norm == clip.max_norm:
                found[index] = replace(earlier, names=earlier.names | clip.names)
                break
        else:
            found.append(clip)
    return found


def wrong_clipping(scopes: Sequence[Scope]) -> list[NormFinding]:
    """Return findings on wrong norms; else on gradients that are not scaled, or scaled again."""
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
    """Return the reason that clipping cannot be judged; empty if it can."""
    numbers = {len(rank_clips) for step in clips for rank_clips in step if rank_clips}
    if not numbers:
        return "the loop gives no gradient to a clipping function of torch: give max_norm= if it clips by hand"
    if len(numbers) > 1:
        return "ranks clip unequally often in a step"
    other_order = any(clip.order != 2 for step in clips for rank_clips in step for clip in rank_clips)
    return "the norm is of another order than 2" if other_order else ""


def counted_as_parts(steps: Sequence[Sequence[RankStep]], clips: list[list[list[Clip]]], hand: bool) -> str:
    """Return a note on equal weights with different gradients, if the loop's norms are right with these as parts.

    Empty otherwise. Experts that start from one seed look like copies without a reduction, but the loop is right.
    """
    if not list(unreduced(Table(steps, hand))):
        return ""
    table = Table(steps, hand, as_parts=True)
    number_of = max(len(rank_clips) for rank_clips in clips[0])
    scopes = [Scope(table, index, clips, number_of == 1) for index in range(number_of)]
    if wrong_clipping(scopes) or (hand and not scopes[0].is_reached()):
        return ""
    held = [each for each in Table(steps, hand).held if not each.open]
    pairs = [pair for each in held if each not in table.held for pair in each.names.items()]
    return f"; {listed(pairs)} start equal on several ranks with different gradients, and are counted as parts"


def judged(steps: Sequence[Sequence[RankStep]], max_norm: float | None) -> Verdict:
    """Return the verdict on some steps of all ranks. `max_norm`: of a loop that does not call torch's functions."""
    clipped = any(each.clips for step in steps for each in step)
    hand = not clipped and max_norm is not None
    if max_norm is not None and hand:
        # Every tensor with a gradient may have been counted.
        steps = [
            [replace(each, clips=(Clip(frozenset(each.parts), max_norm, max_norm),)) for each in step] for step in steps
        ]
    elif clipped:
        steps = [step for step in steps if any(each.clips for each in step)]
    if not steps:
        return Verdict([], ["the optimizer has not stepped: call check() behind the loop"], judged=False)
    clips = [[merged(each.clips) for each in step] for step in steps]
    reason, findings = not_judged(clips), list[NormFinding]()
    number_of = max(len(rank_clips) for rank_clips in clips[0])
    alike = "" if reason else counted_as_parts(steps, clips, hand)
    for length in range(1, len(steps) + 1):
        table = Table(steps[:length], hand, as_parts=bool(alike))
        # After a wrong norm, copies differ one step later, so the first step with a mistake decides.
        if (apart := list(unreduced(table))) or reason:
            findings = findings or apart
        else:
            scopes = [Scope(table, index, clips[:length], number_of == 1) for index in range(number_of)]
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
