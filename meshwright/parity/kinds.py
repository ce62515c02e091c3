"""Finds the kind and the module of the first mistake, from the records of a check. The first mistake is the finding.

| kind                | evidence                                                                                     |
|---------------------|----------------------------------------------------------------------------------------------|
| wrong part          | a first weight that is no part of the reference's, or a part that no rank holds              |
| wrong data          | rows of the global batch that no rank takes, or a share that is no part of the global batch  |
| missing reduction   | partial sums used as the whole; copies that differ over an axis; statistics of one rank      |
| scaled              | right except for a factor: the size of an axis, a mean for a sum, a sum for a mean           |
| incomplete sum      | a sum without the terms of some ranks, microbatches, pieces or uses (terms.py)               |
| token counts        | the mean of ranks' means; right with equal numbers of labels and wrong with unequal          |
| leak                | outputs that change with other tokens than on the reference                                  |
| clipping            | all gradients off by one factor with clipping, or left unclipped                             |
| no gradient         | zero, or none, but the reference has a gradient                                              |
| accumulated         | the gradient of all steps so far: it was not set to zero                                     |
| accumulation        | right in one pass, and wrong in several passes that add up gradients                         |
| optimizer           | right gradients, wrong weights after the step                                                |
| cut update          | weights that the optimizer updated as if each rank's part were the whole                     |
| stale weights       | right weights, and outputs of the weights before; weights that were not written back         |
| wrong buffer        | right weights, and wrong running statistics or other buffers                                 |
| dropout             | replicas that are equal without dropout and differ with dropout                              |
| lower precision     | off by the rounding of a narrower type than the model's, of the tensor or of terms           |
| wrong values        | none of these                                                                                |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.parity.batches import DROPOUT_STEP
from meshwright.parity.compare import Row, factor_of, relative_error
from meshwright.parity.explain import COPY, CUT
from meshwright.parity.forward import forward_finding
from meshwright.parity.gradients import ALL, MODEL, MOST, OF_SHARES, GradientStep, Mistake, gradient_finding, owner_of
from meshwright.parity.judge import Evidence, ModuleLine
from meshwright.parity.later import Case, and_more, later_finding, wrong_weights
from meshwright.parity.leaks import leak_finding
from meshwright.parity.parts import Part, missing_places
from meshwright.parity.record import CLIPPED, COARSE


def first_finding(evidence: Evidence, rows: Sequence[Row]) -> Mistake | None:
    """Return the first mistake in the order of cause and effect; None without a mistake."""
    failed: dict[tuple[str, int], list[str]] = {}
    for row in (row for row in rows if not row.holds):
        failed.setdefault((row.kind, row.step), []).append(row.name)
    case = Case(evidence, failed)
    steps = range(1, max((step for _, step in failed), default=0) + 1)
    found = (mistake for rule in FIRST_STEP if (mistake := rule(case)) is not None)
    later = (mistake for step in steps for rule in EVERY_STEP if (mistake := rule(case, step)) is not None)
    first = next(found, None) or next(later, None) or _dropout(evidence)
    # The top-level model, for parameters outside of submodules, has an empty path.
    return first if first is None or first.module else replace(first, module=MODEL)


def other_weights(case: Case) -> Mistake | None:
    """Find wrong first weights; all later results depend on these."""
    if not (wrong := case.wrong("initial", 0)):
        return None
    text = f"the first values of {wrong[0]}{and_more(wrong)} are not the reference's"
    return Mistake("wrong part", owner_of(wrong[0]), text)


def no_part(case: Case) -> Mistake | None:
    """Find a rank's first weight that is no part of the reference's."""
    for rank, side in enumerate(case.evidence.ranks):
        for name, why in side.facts.lost.items():
            text = f"rank {rank}'s first value of {name} ({why}) is no part of the reference's weights"
            return Mistake("wrong part", owner_of(name), text)
    return None


def held_by_none(case: Case) -> Mistake | None:
    """Find a parameter with elements that no rank holds."""
    for name in case.evidence.names:
        if missing := case.evidence.missing[name]:
            held = [shard for _, _, shard in case.evidence.holders[name]]
            parts = ", ".join(sorted({str(shard) for shard in held})) or "none"
            return Mistake("wrong part", owner_of(name), f"no rank has {missing} elements of {name}: held are {parts}")
    return None


def taken_by_none(case: Case) -> Mistake | None:
    """Find samples of the global batch that no rank takes. A share in a private form of the program proves nothing."""
    for key, shape in case.evidence.reference.facts.batch.items():
        rows = [side.facts.rows.get(key) for side in case.evidence.ranks]
        held = [Part.from_json(tree) for tree in rows if tree is not None]
        # Rows that were mixed, padded or packed are no slices of the batch. Wrong rows of this kind change the loss.
        if not shape or len(held) < len(rows):
            continue
        # If slices are equal, a rank may have taken any of these.
        alike = [Part.from_json(tree) for side in case.evidence.ranks for tree in side.facts.alike.get(key, ())]
        if missing_places([*held, *alike], shape):
            where = "; ".join(f"rank {rank}: {shard}" for rank, shard in enumerate(held))
            return Mistake(
                "wrong data", "(data)", f"samples of {key} that no rank takes, and others several times ({where})"
            )
    return None


def foreign_share(evidence: Evidence) -> str:
    """Return a sentence on the first tensor of a rank's share that is no part of the global batch; empty if none."""
    for rank, side in enumerate(evidence.ranks):
        for key, tree in side.facts.rows.items():
            if tree is None:
                return f"rank {rank}'s `{key}` are no rows of the global batch"
    return ""


def stepped_twice(case: Case) -> Mistake | None:
    """Find an optimizer that steps several times during one step of the reference."""
    times = max((side.facts.stepped[0] for side in case.evidence.ranks if side.facts.stepped), default=0)
    if times < 2 or not case.failed:
        return None
    text = f"an optimizer steps {times} times in one step of the program, where the reference's steps once"
    return Mistake("optimizer", ALL, text)


def comparable_lines(case: Case) -> list[ModuleLine]:
    """Return the modules with samples in the reference's arrangement.

    Experts receive samples of other ranks, or of each microbatch separately. The output of the enclosing module is then
    right, and the outputs of experts differ. These experts are left out if all else is right, with microbatches, or if
    their outputs have another shape.
    """
    lines = case.evidence.modules
    whole = case.failed and all(side.facts.micro < 2 for side in case.evidence.ranks)
    right: dict[str, bool] = {}
    for line in lines:
        if line.output is not None:
            # A partial sum may be the mistake.
            holds = line.output.explained and (not case.failed or line.output.kind in (COPY, CUT))
            right[line.name] = right.get(line.name, True) and holds  # in all calls
    # A wrong module inside of a right one has samples in another arrangement.
    outer = [name for name, holds in right.items() if holds]
    return [line for line in lines if right.get(line.name, True)
            or (whole and line.output is not None and not math.isinf(line.output.error))
            or not any(line.name.startswith(f"{name}.") for name in outer)]  # fmt: skip


def wrong_output(case: Case) -> Mistake | None:
    """Find the first module with a wrong output; returns a leak or wrong samples if these explain the output."""
    evidence = case.evidence
    lines = comparable_lines(case)
    found = forward_finding(evidence, lines)
    if found is None or found.kind not in ("wrong values", "wrong part"):
        return found
    first = next((line for line in lines if line.output is not None and not line.output.explained), None)
    foreign = foreign_share(evidence)
    # The very first module reads the samples.
    if foreign and first is not None and first is evidence.modules[0]:
        return Mistake("wrong data", "(data)", f"{foreign}, and {found.text}")
    for rank, side in enumerate(evidence.ranks):
        for name, said in side.facts.said.items():
            if name.startswith(f"{found.module}."):
                held = next(
                    shard
                    for holder, local_name, shard in evidence.holders[name]
                    if (holder, local_name) == (rank, name)
                )
                text = f"rank {rank} holds {held} of {name}, whose placements say {said}: it was loaded otherwise"
                return Mistake("wrong part", owner_of(name), text)
    leak = leak_finding(evidence)
    if leak is None or first is None:
        return found
    order = [line.name for line in evidence.modules]
    # A leak in a later module than the first wrong one is only a consequence.
    before = leak.module == MODEL or order.index(leak.module) <= order.index(first.name)
    return Mistake("leak", found.module, leak.text) if before else found


def wrong_gradient(case: Case) -> Mistake | None:
    """Find wrong gradients in a first step with right outputs."""
    if not (wrong := case.wrong("gradient", 1)):
        return None
    evidence = case.evidence
    found = gradient_finding(evidence, wrong, GradientStep(1, "gradient", comparable_lines(case)))
    if (CLIPPED, 1) in evidence.reference.recorded:
        differ = {
            quantity: [evidence.replicas_differ(quantity, 1, name) for name in wrong]
            for quantity in ("gradient", CLIPPED)
        }
        if all(differ["gradient"]) and not any(differ[CLIPPED]):
            text = f"the gradient of {wrong[0]}{and_more(wrong)} differs on ranks with the same part before clipping"
            return Mistake("clipping", found.module, f"{text}, and not behind it: each rank clips its own, then adds")
        found = replace(found, text=f"{found.text} (before clipping)")
    foreign = foreign_share(evidence)
    vague = (
        found.kind == "token counts"
        or OF_SHARES in found.text
        or (found.kind == "wrong values" and found.module in ("(loss)", ALL))
    )
    if foreign and (vague or (("loss", 1) in case.failed and found.kind == "wrong values")):
        return Mistake("wrong data", "(data)", f"{foreign}: outputs are right, and losses and gradients are not")
    return found


def wrong_clipping(case: Case) -> Mistake | None:
    """Find gradients that are right before clipping, and wrong after clipping."""
    evidence = case.evidence
    if not (wrong := case.wrong(CLIPPED, 1)):
        return None
    trained = evidence.trained()
    where = ALL if len(set(wrong) & set(trained)) >= MOST * len(trained) else owner_of(wrong[0])
    behind, before = ([(ours, theirs) for _, _, ours, theirs in evidence.pieces(quantity, 1, wrong[0])]
                      for quantity in (CLIPPED, "gradient"))  # fmt: skip
    factors = [None if ours is None else factor_of(ours, theirs) for ours, theirs in behind]
    known = sorted({f"{f:.6g}" for f in factors if f is not None})
    text = f"all gradients are right before clipping; behind it that of {wrong[0]}{and_more(wrong)} is"
    pairs = zip(behind, before, strict=True)
    if all(x is not None and y is not None and relative_error(x, y) == 0 for (x, _), (y, _) in pairs):
        return Mistake("clipping", where, f"{text} unchanged: not clipped")
    if None not in factors:
        norm = "each clips by a norm of its own" if len(known) > 1 else "clipped by another norm"
        return Mistake("clipping", where, f"{text} the reference's times {', '.join(known)} on its ranks: {norm}")
    return Mistake("clipping", where, f"{text} no multiple of the reference's")


def hidden_leak(case: Case) -> Mistake | None:
    """Find a leak that coarse rounding hides. In finer types a leak is also a wrong output."""
    return leak_finding(case.evidence) if case.evidence.reference.facts.dtype in COARSE else None


def reported_loss(case: Case) -> Mistake | None:
    """Find a wrong loss with right gradients: only the reported number is wrong."""
    if ("loss", 1) not in case.failed:
        return None
    right = "gradients" if ("gradient", 1) in case.evidence.reference.recorded else "weights"
    text = f"the loss that the program reports is not the reference's, whose outputs and {right} are right"
    return Mistake("scaled", "(loss)", text)


def reported_norm(case: Case) -> Mistake | None:
    """Find a wrong gradient norm with right gradients: only the reported number is wrong."""
    if ("norm", 1) not in case.failed:
        return None
    text = "the gradient norm that the program reports is not the reference's, whose gradients are right"
    return Mistake("clipping", ALL, text)


FIRST_STEP: tuple[Callable[[Case], Mistake | None], ...] = (
    other_weights,
    no_part,
    held_by_none,
    taken_by_none,
    stepped_twice,
    wrong_output,
    wrong_gradient,
    wrong_clipping,
    reported_loss,
    reported_norm,
    hidden_leak,
)
"""The rules on a rank's inputs and on the first step, in the order of cause and effect; the first mistake found is the
finding."""


def copies(case: Case, step: int) -> Mistake | None:
    """Find copies that differ by less than the tolerance of a coarse type.

    Different weights with equal gradients were changed by something other than the step. Gradients that differ under
    clipping were most likely clipped by a different norm on each rank.
    """
    if not (wrong := case.wrong("copy", step)):
        return None
    quantity, _, name = wrong[0].partition(" of ")
    text = f"the {wrong[0]}{and_more(wrong)} in step {step} has other bits on ranks that hold the same part of it"
    if quantity != "weight" and case.evidence.reference.facts.clip is not None:
        return Mistake("clipping", ALL, f"{text}: each clips by a norm of its own")
    return Mistake("stale weights" if quantity == "weight" else "missing reduction", owner_of(name), text)


def states(case: Case, step: int) -> Mistake | None:
    """Find wrong states of the optimizer with right weights and gradients."""
    if not (wrong := case.wrong("state", step)):
        return None
    text = f"{wrong[0]}{and_more(wrong)} is wrong after step {step}, and all weights and gradients are right"
    names = [name.partition(" of ")[2] for name in wrong]
    trained = case.evidence.trained()
    nearly_all = len(set(trained) & set(names)) >= MOST * len(trained)
    return Mistake("optimizer", ALL if nearly_all else owner_of(names[0]), text)


def buffers(case: Case, step: int) -> Mistake | None:
    """Find wrong buffers with right weights: the model trains right and evaluates wrong."""
    if not (wrong := case.wrong("buffer", step)):
        return None
    text = f"the buffer {wrong[0]}{and_more(wrong)} is not the reference's after step {step}, and the weights are"
    return Mistake("wrong buffer", owner_of(wrong[0]), f"{text}: statistics of one rank's samples, most likely")


EVERY_STEP: tuple[Callable[[Case, int], Mistake | None], ...] = (later_finding, wrong_weights, copies, states, buffers)
"""The rules of every step, the first step's weights among them."""


def _dropout(evidence: Evidence) -> Mistake | None:
    """Find replicas that differ because of dropout: outputs that were equal on some ranks, or weights of one part.

    This rule is last: with dropout there is no reference, and only replicas can be compared with each other.
    """
    if not any(side.facts.dropout for side in evidence.ranks):
        return None
    for line in evidence.modules:
        if line.output is None or not line.output.explained:
            continue
        pairs = [
            (side.get("output", 0, line.name), side.get("output@dropout", 0, line.name)) for side in evidence.ranks
        ]
        held = [(plain, dropped) for plain, dropped in pairs if plain is not None and dropped is not None]
        for plain, dropped in held:
            # Ranks with equal outputs without dropout must have equal masks; others may have different masks.
            first = next(pair for pair in held if pair[0].shape == plain.shape
                         and relative_error(plain, pair[0]) <= line.output.allowed)  # fmt: skip
            if dropped.shape == first[1].shape and relative_error(dropped, first[1]) > line.output.allowed:
                text = f"the output of {line.name} is equal on some ranks, and differs under dropout: its masks differ"
                return Mistake("dropout", line.name or MODEL, text)
    for name in evidence.names:
        if evidence.replicas_differ("weight", DROPOUT_STEP, name):
            text = f"replicas of {name} differ after a step with dropout: masks differ where they must not"
            return Mistake("dropout", owner_of(name), text)
    return None
