"""The kind of a mistake, and its module, from all that a check has left. The first that is wrong is the finding.

| kind                | what shows it                                                                                |
|---------------------|----------------------------------------------------------------------------------------------|
| wrong part          | a first weight that is no part of the reference's, or a part that no rank holds              |
| wrong data          | rows of the global batch that no rank takes, or a share that is no part of it                |
| missing reduction   | partial sums where the next module takes a whole; copies that differ over an axis            |
| scaled              | right but for a factor: the size of an axis, a mean for a sum, a sum for a mean              |
| incomplete sum      | equal on all ranks, and one rank's term alone                                                |
| token counts        | the mean of ranks' means; right with equal numbers of labels and wrong with unequal          |
| clipping            | all gradients off by one factor where they are clipped, or left unclipped                    |
| no gradient         | zero, or none, where the reference has one                                                   |
| accumulated         | the gradient of all steps so far: it was not set to zero                                     |
| accumulation        | right in one pass, and wrong where two add up their gradients                                |
| optimizer           | right gradients, wrong weights after the step                                                |
| stale weights       | right weights, and outputs of the weights before                                             |
| dropout             | replicas are equal without dropout and differ with it                                        |
| lower precision     | off by the rounding of a narrower type than the model's                                      |
| wrong values        | none of these                                                                                |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.parity.compare import Row, axis_words, relative_error
from meshwright.parity.explain import COPY, PARTIAL, axis_subsets, fit, groups_over
from meshwright.parity.gradients import (
    ALL,
    Mistake,
    gradient_finding,
    hypothesis_of,
    is_rounding,
    near,
    owner_of,
)
from meshwright.parity.judge import Evidence, ModuleLine
from meshwright.parity.parts import Part, missing_places
from meshwright.parity.reference import DROPOUT_STEP, HALVED_STEP


def first_finding(evidence: Evidence, rows: Sequence[Row]) -> Mistake | None:
    """The first mistake in the order of cause and effect; None where all holds."""
    failed: dict[tuple[str, int], list[str]] = {}
    for row in (row for row in rows if not row.holds):
        failed.setdefault((row.kind, row.step), []).append(row.name)
    # Other weights make everything behind them wrong, so nothing else is worth a look.
    if wrong := failed.get(("initial", 0)):
        text = f"the first values of {wrong[0]}{_and_more(wrong)} are not the reference's"
        return Mistake("wrong part", owner_of(wrong[0]), text)
    first = _wrong_part(evidence) or _wrong_data(evidence) or forward_finding(evidence)
    if first is not None:
        return first
    if wrong := failed.get(("gradient", 1)):
        return gradient_finding(evidence, [name for name in evidence.names if name in wrong])
    # After the gradients: a loss alone is wrong only in what is reported, where the gradients that it gave are right.
    if ("loss", 1) in failed:
        text = "the loss that the program reports is not the reference's, whose outputs and gradients are right"
        return Mistake("scaled", "(loss)", text)
    if ("norm", 1) in failed:
        text = "the gradient norm that the program reports is not the reference's, whose gradients are right"
        return Mistake("clipping", ALL, text)
    for step in range(1, max((step for _, step in failed), default=0) + 1):
        late = _later(evidence, failed, step) if step > 1 else None
        wrong = failed.get(("weight", step), [])
        late = late or (_wrong_weights(evidence, wrong, step) if wrong else None)
        if late is None and (wrong := failed.get(("copy", step), [])):
            # Copies that differ by less than a coarse type's tolerance; equal gradients and other weights were stepped
            # by something else, gradients under clipping most likely by norms of their own.
            kind, _, name = wrong[0].partition(" of ")
            text = (
                f"the {wrong[0]}{_and_more(wrong)} in step {step} has other bits on ranks that hold the same part of it"
            )
            if kind != "weight" and evidence.reference.facts.clip is not None:
                late = Mistake("clipping", ALL, f"{text}: each clips by a norm of its own")
            else:
                late = Mistake("stale weights" if kind == "weight" else "missing reduction", owner_of(name), text)
        if late is None and (wrong := failed.get(("state", step), [])):
            text = f"{wrong[0]}{_and_more(wrong)} is wrong after step {step}, and all weights and gradients are right"
            late = Mistake("optimizer", owner_of(wrong[0].partition(" of ")[2]), text)
        if late is not None:
            return late
    # Last: with dropout there is no reference, and only replicas can be held against each other.
    return _dropout(evidence)


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _wrong_part(evidence: Evidence) -> Mistake | None:
    """A rank's first weight that is no part of the reference's; elements that no rank holds."""
    for rank, side in enumerate(evidence.ranks):
        for name, why in side.facts.lost.items():
            text = f"rank {rank}'s first value of {name} ({why}) is no part of the reference's weights"
            return Mistake("wrong part", owner_of(name), text)
    for name in evidence.names:
        if missing := evidence.missing[name]:
            held = [part for _, _, part in evidence.holders(name)]
            parts = ", ".join(sorted({str(part) for part in held})) or "none"
            return Mistake("wrong part", owner_of(name), f"no rank has {missing} elements of {name}: held are {parts}")
    return None


def _wrong_data(evidence: Evidence) -> Mistake | None:
    """Samples of the global batch that no rank takes. A share in a form of the program's own says nothing."""
    for key, shape in evidence.reference.facts.batch.items():
        rows = [side.facts.rows.get(key) for side in evidence.ranks]
        held = [Part.from_json(tree) for tree in rows if tree is not None]
        # Rows that were mixed, padded or packed are no slices of the batch; whether they are the right ones shows in
        # the loss.
        if not shape or len(held) < len(rows):
            continue
        if missing_places(held, shape):
            where = "; ".join(f"rank {rank}: {part}" for rank, part in enumerate(held))
            return Mistake(
                "wrong data", "(data)", f"samples of {key} that no rank takes, and others several times ({where})"
            )
    return None


def forward_finding(evidence: Evidence) -> Mistake | None:
    """The first module in forward order whose output is none of the reference's.

    Where its input is wrong already, the mistake is between: in a module before that gave partial sums, which were
    taken for the whole, or else in the code of the parent.
    """
    lines = evidence.modules
    for place, line in enumerate(lines):
        output, name = line.output, line.name or "the model"
        if output is None or output.explained:
            continue
        # A partial sum as the input is explained and wrong all the same: this module takes a whole.
        lost = line.input is not None and (not line.input.explained or line.input.kind == PARTIAL)
        partial = [other for other in lines[:place] if other.output is not None and other.output.kind == PARTIAL]
        # Where the input is right, the partial sum must come from inside of this module to be its mistake.
        if partial and (lost or all(other.name.startswith(f"{line.name}.") for other in partial)):
            source, over = partial[-1].name, partial[-1].output
            assert over is not None
            text = f"{source} gives partial sums over {over.axis}, which {name} takes for the whole"
            return Mistake("missing reduction", source, f"{text}: an all-reduce is missing")
        if output.leaves_out:
            return Mistake(
                "wrong part", line.name, f"the ranks' outputs of {name} lack some of its slices, and repeat others"
            )
        if (biased := _linear_finding(evidence, line)) is not None:
            return biased
        where = evidence.reference.facts.parents.get(line.name, "") if lost and place else line.name
        if output.factor is not None and abs(output.factor - 1) > 0.01:
            factor = f"{output.factor:.4g}{axis_words(evidence.sizes, output.factor)}"
            return Mistake("scaled", where, f"the output of {name} is the reference's times {factor}")
        kind = "lower precision" if is_rounding(evidence, output.error) else "wrong values"
        text = (
            f"the output of {name} on rank {output.rank} is off by {output.error:.1e} (allowed: {output.allowed:.1e})"
        )
        return Mistake(kind, where, f"{text}; so is its input, and all before is right" if lost else text)
    return None


def _linear_finding(evidence: Evidence, line: ModuleLine) -> Mistake | None:
    """A linear's product and bias, each times a number: the product of one rank alone, reduced twice, a bias a rank."""
    if f"{line.name}.bias" not in evidence.names:
        return None
    bias, calls = evidence.weight(f"{line.name}.bias"), evidence.reference.num_calls(line.name)
    whole = evidence.reference.call("output", line.name, line.call, calls)
    held = [side.call("output", line.name, line.call, calls) for side in evidence.ranks]
    ours = [x for x in held if x is not None]
    if whole is None or len(ours) < len(held) or len({x.shape for x in ours}) > 1 or bias.shape != ours[0].shape[-1:]:
        return None
    # A row-parallel linear whose ranks each add the bias: the sum has the product once and the bias once a rank.
    for axes in axis_subsets(evidence.coordinates):
        group = next(group for group in groups_over(evidence.coordinates, axes))
        product, times = _product_and_bias(torch.stack([ours[rank] for rank in group]).sum(0), whole, bias)
        if math.isclose(product, 1, rel_tol=1e-2) and math.isclose(times, len(group), rel_tol=1e-2):
            text = f"the product of {line.name} on each rank is a partial sum over {'+'.join(axes)}"
            return Mistake("missing reduction", line.name, f"{text}: an all-reduce is missing")
    product, times = _product_and_bias(ours[0], whole, bias)
    if not math.isnan(product) and max(abs(product - 1), abs(times - 1)) > 1e-2:
        text = (
            f"the output of {line.name} has the reference's product {product:.4g} times and its bias {times:.4g} times"
        )
        return Mistake("scaled", line.name, f"{text}: added up once too often")
    return None


def _product_and_bias(ours: Tensor, whole: Tensor, bias: Tensor) -> tuple[float, float]:
    """How many times a linear's output has the reference's product, and how many times the bias; nan for neither."""
    found = fit(ours, whole, 0.0)
    if found is None:
        return math.nan, math.nan
    # output = a (x W) + b bias, solved for a and b by least squares.
    terms = torch.stack([(found.piece - bias).flatten(), bias.expand_as(ours).flatten()], 1)
    solved = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
    if relative_error((terms @ solved).flatten(), ours.flatten()) > 1e-2:
        return math.nan, math.nan
    return float(solved[0]), float(solved[1])


def _wrong_weights(evidence: Evidence, wrong: Sequence[str], step: int) -> Mistake:
    """Weights that are wrong after a step whose outputs and gradients are right."""
    if wrong[0] not in evidence.names:  # all of them as one
        text = "all gradients are right, and the weights are wrong: look at what the optimizer does"
        return Mistake("optimizer", ALL, text)
    others = _and_more(wrong)
    for name in wrong:
        if evidence.replicas_differ("weight", step, name):
            text = f"{name}{others} differs after step {step} between ranks that hold the same part of it"
            return Mistake("stale weights", owner_of(name), text)
    # Where no gradient was kept, nothing says whether the optimizer or a reduction before it is wrong.
    kept = any(x is not None for name in wrong for _, _, x, _ in evidence.pieces("gradient", step, name))
    seen = "all gradients are right" if kept else "all outputs are right, and the program keeps no gradients to look at"
    where = ALL if len(wrong) == len(evidence.names) else owner_of(wrong[0])
    text = f"{seen}, and {wrong[0]}{others} is wrong after step {step}: look at what the optimizer does"
    return Mistake("optimizer", where, text)


def _later(evidence: Evidence, failed: Mapping[tuple[str, int], list[str]], step: int) -> Mistake | None:
    """A mistake that shows in this step first: all is right in the steps before. Wrong weights alone are left to
    `_wrong_weights`."""
    wrong, weights = failed.get(("gradient", step), []), failed.get(("weight", step), [])
    last = len(evidence.reference.facts.losses)
    h = hypothesis_of(evidence, wrong[0], step) if wrong else None
    if h is not None and h.kind == "accumulated":
        return Mistake(h.kind, ALL, f"the gradient of {wrong[0]} in step {step} is {h.text}")
    if step == 2 and (wrong or weights or ("loss", 2) in failed) and _is_stale(evidence):
        text = "the second step's loss is that of the first weights: what is stepped is not what computes"
        return Mistake("stale weights", ALL, text)
    # The second step alone is taken in two halves, so what first shows there is likely their sum.
    if step == HALVED_STEP and wrong and any(side.facts.halves for side in evidence.ranks):
        text = "all is right in one pass, and wrong where two halves of the samples add up their gradients"
        return Mistake("accumulation", ALL, f"{text}: that of {wrong[0]}{_and_more(wrong)}")
    if step == last and evidence.reference.facts.unequal and (wrong or weights):
        text = (
            "all is right while ranks have equal numbers of valid labels, and wrong with unequal ones: a mean of means"
        )
        return Mistake("token counts", "(loss)", text)
    if h is not None:
        # Other gradients of right data and a right first step come from weights that were not the stepped ones.
        kind = h.kind if h.kind in ("clipping", "scaled") else "stale weights"
        where = ALL if kind != "stale weights" else owner_of(wrong[0])
        return Mistake(kind, where, f"all is right before, and the gradient of {wrong[0]} in step {step} is {h.text}")
    number = next((kind for kind in ("loss", "norm") if (kind, step) in failed), None)
    if number is not None:
        seen = ("weight", step - 1) in evidence.reference.recorded
        kind = "stale weights" if seen else "optimizer"  # the weights of the step before may be wrong as well
        text = f"all is right before, and the {number} of step {step} is not the reference's"
        return Mistake(kind, ALL, text if seen else f"{text}: look at what the optimizer does")
    return None


def _is_stale(evidence: Evidence) -> bool:
    """Whether the second step's loss is that of the first weights."""
    stale, right = evidence.reference.facts.stale_loss, evidence.reference.facts.losses[1]
    losses = [x for side in evidence.ranks if (x := side.facts.losses[1]) is not None]
    if stale is None:
        return False
    allowed = near(evidence.allowed("loss", 2, "")) * abs(stale)
    # A rank's own loss, or the mean over ranks that each report their share's.
    choices = (*losses, *((sum(losses) / len(losses),) if losses else ()))
    return any(abs(x - stale) <= min(allowed, 0.25 * abs(x - right)) for x in choices)


def _dropout(evidence: Evidence) -> Mistake | None:
    """Replicas that dropout has made different: outputs that were copies on every rank, or weights of one part."""
    if not any(side.facts.dropout for side in evidence.ranks):
        return None
    for line in evidence.modules:
        if line.output is not None and line.output.kind == COPY:
            # A tensor that all ranks hold whole must be dropped by the same mask; cut ones have masks of their own by
            # right.
            held = [x for side in evidence.ranks if (x := side.get("dropout", 0, line.name)) is not None]
            if any(relative_error(x, held[0]) > line.output.allowed for x in held):
                text = f"the output of {line.name} is a copy on every rank, and differs under dropout: its masks differ"
                return Mistake("dropout", line.name, text)
    for name in evidence.names:
        if evidence.replicas_differ("weight", DROPOUT_STEP, name):
            text = f"replicas of {name} differ after a step with dropout: masks differ where they must not"
            return Mistake("dropout", owner_of(name), text)
    return None
