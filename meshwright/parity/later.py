"""Finds mistakes that are visible only after right first gradients: in weights, and in later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parity.batches import HALVED_STEP
from meshwright.parity.compare import factor_of, relative_error
from meshwright.parity.forward import forward_finding
from meshwright.parity.gradients import (
    ALL,
    MOST,
    GradientStep,
    Mistake,
    gradient_finding,
    hypothesis_of,
    near,
    owner_of,
)
from meshwright.parity.judge import Evidence, explain_modules
from meshwright.parity.record import PASSES, UPDATED


@dataclass(frozen=True)
class Case:
    """The input of the rules. `failed`: the names of failed comparisons, by quantity and step."""

    evidence: Evidence
    failed: Mapping[tuple[str, int], list[str]]

    def wrong(self, quantity: str, step: int) -> list[str]:
        """Return the parameters with a failed comparison after a step, in order; or names of other rows."""
        names = self.failed.get((quantity, step), [])
        return [name for name in self.evidence.names if name in names] or names


def and_more(names: Sequence[str]) -> str:
    """Return ` (and 3 more)` for the names after the first; empty if there is one."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def wrong_weights(case: Case, step: int) -> Mistake | None:
    """Explain weights that are wrong after a step with right outputs and gradients."""
    evidence, wrong = case.evidence, case.wrong("weight", step)
    if not wrong:
        return None
    if wrong[0] not in evidence.names:  # all parameters are compared as one tensor
        text = "all gradients are right, and the weights are wrong: look at what the optimizer does"
        return Mistake("optimizer", ALL, text)
    others, facts = and_more(wrong), evidence.reference.facts
    trained = evidence.trained()
    where = ALL if len(set(wrong) & set(trained)) >= MOST * len(trained) else owner_of(wrong[0])
    if moved := [name for name in wrong if name in facts.frozen]:
        text = f"{moved[0]}{and_more(moved)} is frozen on the reference, and has moved after step {step}"
        return Mistake("optimizer", owner_of(moved[0]), text)
    if (rates := _other_rates(evidence, step)) is not None:
        return Mistake("optimizer", where, f"{rates}; {wrong[0]}{others} is wrong after it")
    for name in wrong:
        if evidence.replicas_differ("weight", step, name):
            text = f"{name}{others} differs after step {step} between ranks that hold the same part of it"
            return Mistake("stale weights", owner_of(name), text)
    if (cut := _cut_updates(evidence, wrong, step)) is not None:
        return cut
    if all(is_unmoved(evidence, name, step) for name in wrong):
        text = f"{wrong[0]}{others} is after step {step} as it was before"
        if not any(x is not None for name in wrong for _, _, x, _ in evidence.pieces("gradient", step, name)):
            has_gradients = any(("gradient", step) in side.recorded for side in evidence.ranks)
            where = where if has_gradients else ALL
            return Mistake("no gradient", where, f"{text}, and no rank has a gradient of it when the optimizer steps")
        if where == ALL:
            return Mistake("stale weights", ALL, f"{text}: not stepped, or what was stepped is not written back")
        return Mistake("optimizer", where, f"{text}: the optimizer does not have it")
    # Without recorded gradients it is unknown whether the optimizer or the reduction before is wrong.
    has_gradients = any(x is not None for name in wrong for _, _, x, _ in evidence.pieces("gradient", step, name))
    moves: tuple[list[Tensor], list[Tensor]] = [], []
    for name in wrong if not has_gradients and where == ALL and step == 1 else ():
        for _, shard, x, y in evidence.pieces("weight", step, name):
            for side, move in zip(moves, (y if x is None else x, y), strict=True):
                side.append((move - shard.take(evidence.weight(name))).flatten())
    if moves[0] and (factor := factor_of(torch.cat(moves[0]), torch.cat(moves[1]))) is not None:
        text = f"all outputs are right, and the updates of all parameters are the reference's times {factor:.4g}"
        return Mistake("optimizer", ALL, f"{text}: another learning rate, clipping, or scale of the gradients")
    seen = (
        "all gradients are right"
        if has_gradients
        else "all outputs are right, and the program keeps no gradients to look at"
    )
    text = f"{seen}, and {wrong[0]}{others} is wrong after step {step}: look at what the optimizer does"
    return Mistake("optimizer", where, text)


def _other_rates(evidence: Evidence, step: int) -> str | None:
    """Return a sentence on a wrong learning rate in a step; None if the rates are right or unknown."""
    rates = evidence.reference.facts.rates
    theirs = rates[step - 1] if len(rates) >= step else []
    for rank, side in enumerate(evidence.ranks):
        ours = side.facts.rates[step - 1] if len(side.facts.rates) >= step else []
        if theirs and any(all(abs(x - y) > 1e-6 * abs(y) for y in theirs) for x in ours):
            said = [", ".join(f"{x:.4g}" for x in rates) for rates in (ours, theirs)]
            return f"rank {rank} steps with the learning rate {said[0]} in step {step}, the reference with {said[1]}"
    return None


def _cut_updates(evidence: Evidence, wrong: Sequence[str], step: int) -> Mistake | None:
    """Find weights that the optimizer updated as if each rank's part were a whole parameter."""
    if step != 1:
        return None
    for name in wrong:
        for rank, local_name, _ in evidence.holders[name]:
            ours, alone = (evidence.ranks[rank].get(quantity, 1, local_name) for quantity in ("weight", UPDATED))
            allowed = near(evidence.allowed("weight", 1, name))
            if ours is None or alone is None or relative_error(ours, alone) > allowed:
                return None
    text = f"{wrong[0]}{and_more(wrong)} is what the optimizer makes of each rank's part alone: the update depends on "
    text += "the cut (an orthogonalised update, a norm, or a factor over a whole matrix needs all of it)"
    return Mistake("cut update", owner_of(wrong[0]), text)


def is_unmoved(evidence: Evidence, name: str, step: int) -> bool:
    """Return True if all ranks' parts of a weight are equal after a step to the reference's before the step."""
    before = evidence.reference.get("weight", step - 1, name) if step > 1 else evidence.weight(name)
    held = [(shard, x) for rank, local_name, shard in evidence.holders[name]
            if (x := evidence.ranks[rank].get("weight", step, local_name)) is not None]  # fmt: skip
    allowed = evidence.allowed("weight", step, name)
    return before is not None and all(relative_error(x, shard.take(before)) <= allowed for shard, x in held)


def later_finding(case: Case, step: int) -> Mistake | None:
    """Find a mistake that is first visible in a later step: stale weights, accumulation, unequal counts.

    All earlier steps are right. `wrong_weights` handles wrong weights alone.
    """
    if step == 1:
        return None
    evidence, failed, wrong = case.evidence, case.failed, case.wrong("gradient", step)
    weights = failed.get(("weight", step), [])
    unequal = step == evidence.unequal_step
    h = hypothesis_of(evidence, wrong[0], step) if wrong and wrong[0] in evidence.names else None
    if h is not None and h.kind == "accumulated":
        return Mistake(h.kind, ALL, f"the gradient of {wrong[0]} in step {step} is {h.text}")
    second = step == 2 and bool(wrong or weights or ("loss", 2) in failed)
    if second and (found := _second_step(evidence, wrong)) is not None:
        return found
    if unequal and (wrong or weights):
        text = (
            "all is right while ranks have equal numbers of valid labels, and wrong with unequal ones: a mean of means"
        )
        return Mistake("token counts", "(loss)", text)
    if h is not None:
        # With right data and a right first step, wrong gradients show weights that are not the stepped weights.
        category = h.kind if h.kind in ("clipping", "scaled", "lower precision") else "stale weights"
        where = ALL if category != "stale weights" else owner_of(wrong[0])
        return Mistake(
            category, where, f"all is right before, and the gradient of {wrong[0]} in step {step} is {h.text}"
        )
    quantity = next((name for name in ("loss", "norm") if (name, step) in failed), None)
    if quantity == "loss" and unequal:
        text = "gradients are right, and the loss that the program reports is not the reference's where ranks have "
        return Mistake("token counts", "(loss)", f"{text}unequal numbers of labels: a mean of means")
    if quantity is not None:
        seen = ("weight", step - 1) in evidence.reference.recorded
        category = "stale weights" if seen else "optimizer"  # the weights of the step before may be wrong as well
        text = f"all is right before, and the {quantity} of step {step} is not the reference's"
        return Mistake(category, ALL, text if seen else f"{text}: look at what the optimizer does")
    return None


def _second_step(evidence: Evidence, wrong: Sequence[str]) -> Mistake | None:
    """Find a mistake in the trace and the passes of the second step."""
    if _is_stale(evidence):
        text = "the second step's loss is that of the first weights: what is stepped is not what computes"
        return Mistake("stale weights", ALL, text)
    # Gradients that are right in one pass and wrong in two halves show a mistake in accumulation.
    halved = any(("whole-gradient", HALVED_STEP) in side.recorded for side in evidence.ranks)
    quantity = "whole-gradient" if halved else "gradient"
    right = halved and all(is_right(evidence, name, quantity) for name in wrong)
    if wrong and right:
        text = "all is right in one pass, and wrong where two halves of the samples add up their gradients"
        return Mistake("accumulation", ALL, f"{text}: that of {wrong[0]}{and_more(wrong)}")
    if not any(("output" + PASSES[2], 0) in side.recorded for side in evidence.ranks):
        return None
    later = explain_modules(evidence, PASSES[2])
    found = forward_finding(evidence, later, PASSES[2])
    if found is None and wrong:
        found = gradient_finding(evidence, wrong, GradientStep(2, quantity, later))
        if found.kind != "stale weights":
            found = Mistake(found.kind, found.module, f"the first step is right; in the second {found.text}")
    return found


def is_right(evidence: Evidence, name: str, quantity: str) -> bool:
    """Return True if all ranks' pieces of a gradient of the second step are right."""
    whole = evidence.reference.get("gradient", HALVED_STEP, name)
    allowed = evidence.allowed("gradient", HALVED_STEP, name)
    held = [
        (shard, evidence.ranks[rank].get(quantity, HALVED_STEP, local_name))
        for rank, local_name, shard in evidence.holders[name]
    ]
    return whole is not None and all(
        x is not None and relative_error(x, shard.take(whole)) <= allowed for shard, x in held
    )


def _is_stale(evidence: Evidence) -> bool:
    """Return True if the second step's loss is the loss of the first weights."""
    stale, right = evidence.reference.facts.stale_loss, evidence.reference.facts.losses[1]
    losses = [x for side in evidence.ranks if (x := side.facts.losses[1]) is not None]
    if stale is None:
        return False
    allowed = near(evidence.allowed("loss", 2, "")) * abs(stale)
    # A rank's loss, or the mean over ranks if each rank reports the loss of a share.
    choices = (*losses, *((sum(losses) / len(losses),) if losses else ()))
    return any(abs(x - stale) <= min(allowed, 0.25 * abs(x - right)) for x in choices)
