"""All comparisons of a parallel program with the reference: losses, norms, and every parameter's gradient, weight and
optimizer states, joined from the ranks' parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from meshwright.parity.compare import Row, relative_error
from meshwright.parity.explain import axis_subsets, fit, groups_over
from meshwright.parity.judge import Evidence
from meshwright.parity.parts import Part
from meshwright.parity.record import CLIPPED, COARSE, STATE


def compare_all(evidence: Evidence) -> Iterator[Row]:
    """Yield every comparison, in the order of cause and effect.

    Comparisons of parameters are left out if a rank's first weight is no part of the reference's.
    """
    facts, recorded = evidence.reference.facts, evidence.reference.recorded
    yield from parameter_rows(evidence, "initial", 0)
    yield from number_rows(evidence, "loss", facts.losses, [side.facts.losses for side in evidence.ranks], summed=True)
    yield from number_rows(evidence, "norm", facts.norms, [side.facts.norms for side in evidence.ranks])
    # A parameter without a place in the reference cannot be compared; the finding says so.
    if any(side.facts.lost for side in evidence.ranks):
        return
    states = sorted({quantity for quantity, _ in recorded if quantity.startswith(STATE)})
    for step in sorted({step for quantity, step in recorded if quantity in ("gradient", "weight")}):
        for quantity in ("gradient", CLIPPED, "weight", *states):
            if (quantity, step) in recorded:
                yield from parameter_rows(evidence, quantity, step)
            if quantity in ("gradient", "weight") and facts.dtype in COARSE:
                yield from copy_rows(evidence, quantity, step)
        yield from buffer_rows(evidence, step)


def buffer_rows(evidence: Evidence, step: int) -> Iterator[Row]:
    """Compare the buffers that training changes, after a step: each rank has the reference's buffer, or a cut."""
    for name in evidence.reference.facts.buffers:
        whole, errors = evidence.reference.get("buffer", step, name), []
        for side in evidence.ranks:
            x = side.get("buffer", step, name)
            if x is not None and whole is not None:
                found = fit(x, whole, evidence.allowed("buffer", step, name))
                errors.append(math.inf if found is None else found.error)
        if errors:
            yield Row("buffer", name, worst_of(errors), evidence.allowed("buffer", step, name), step)


def copy_rows(evidence: Evidence, quantity: str, step: int) -> Iterator[Row]:
    """Compare copies of gradients or weights after a step with each other. The allowed error is 0.

    Copies are results of one reduction, so copies have equal rounding errors.
    """
    for name in evidence.names:
        first: dict[Part, Tensor] = {}
        errors = [
            relative_error(x, first.setdefault(shard, x))
            for rank, local_name, shard in evidence.holders[name]
            if (x := evidence.ranks[rank].get(quantity, step, local_name)) is not None
        ]
        # With more tensors than parts, at least one part has copies.
        if len(errors) > len(first):
            yield Row("copy", f"{quantity} of {name}", worst_of(errors), 0.0, step)


def number_rows(
    evidence: Evidence, quantity: str, reference: Sequence[float], ranks: Sequence[Sequence[float | None]], *,
    summed: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Compare each rank's numbers by step. `summed`: the mean or a sum over ranks may be equal instead.

    Two infinities, of a step that overflows on both sides, are equal.
    """
    for step, theirs in enumerate(reference, 1):
        ours = [x for numbers in ranks for x in numbers[step - 1 : step] if x is not None]
        if not ours:
            continue
        others = _put_together(evidence, step, ours) if summed and len(ours) > 1 else ()
        errors = [0.0 if x == theirs else abs(x - theirs) / (abs(theirs) or 1.0) for x in (*ours, *others)]
        worst = worst_of(errors[: len(ours)])
        error = min((worst, *errors[len(ours) :]), key=lambda e: (e != e, e))
        # With unequal numbers of labels, the ranks' losses may have an unknown form, and are not compared. An equal
        # number on all ranks is the loss of the whole, and is compared.
        if (
            summed
            and len(set(ours)) > 1
            and step == evidence.unequal_step
            and error > evidence.allowed(quantity, step, "")
        ):
            continue
        yield Row(quantity, f"step {step}", error, evidence.allowed(quantity, step, ""), step)


def _put_together(evidence: Evidence, step: int, ours: Sequence[float]) -> Iterator[float]:
    """Yield candidates for the whole loss from the ranks' losses: the mean, sums over some axes, the mean over labels.

    In a step with unequal numbers of labels the plain mean is not the loss of the whole in general, but may be equal to
    the reference's.
    """
    yield sum(ours) / len(ours)
    if len(ours) < len(evidence.ranks):
        yield sum(ours)
        return
    for axes in axis_subsets(evidence.coordinates):
        sums = [math.fsum(ours[rank] for rank in group) for group in groups_over(evidence.coordinates, axes)]
        # Over other axes the sums must be copies, so the sum that differs most is yielded.
        yield max(sums, key=lambda x: abs(x - sums[0]))
    counts = [side.facts.counts[step - 1] if side.facts.counts else None for side in evidence.ranks]
    known: list[int] = [n for n in counts if n is not None]
    # Equal losses on all ranks are already a mean; a weighted mean would not change these.
    if len(known) == len(ours) and any(known) and len(set(ours)) > 1:
        yield math.fsum(n * x for n, x in zip(known, ours, strict=True) if n) / sum(known)


def worst_of(errors: Iterable[float]) -> float:
    """Return the largest error; NaN is larger than any number."""
    return max(errors, key=lambda error: (error != error, error))


def parameter_rows(evidence: Evidence, quantity: str, step: int) -> Iterator[Row]:
    """Compare a quantity of every parameter after a step, relative to the norm of the reference's tensor.

    Quantities with a stated error for all parameters together are compared as one tensor.

    Tensors that no rank records are left out (wrappers clear gradients in the step). A part that a rank lacks counts as
    zeros; elements that no rank holds give an infinite error. Each part of an optimizer's state needs only one holder,
    since ZeRO assigns the states of a parameter to one owner.
    """
    if not any(x is not None for n in evidence.names for _, _, x, _ in evidence.pieces(quantity, step, n)):
        return
    base_quantity, _, state = quantity.partition(":")
    prefix, squares = f"{state} of " if state else "", []
    for name in evidence.names:
        # A program may compute a gradient of a frozen weight without a step; a step would change the weight.
        if name in evidence.reference.facts.frozen and quantity in ("gradient", CLIPPED):
            continue
        whole = evidence.reference.get(quantity, step, name)
        # The reference's optimizer has no such state for this parameter.
        if whole is None and state:
            continue
        # The error is summed over parts, with the worst copy of each part: a mean over replicas would hide a wrong one.
        # Elements that no rank holds have an infinite error.
        worst: dict[Part, float] = {}
        pieces = list(evidence.pieces(quantity, step, name))
        owned = {shard for _, shard, ours, _ in pieces if ours is not None} if state else set()
        for _, shard, ours, theirs in pieces:
            if ours is None and shard in owned:
                continue
            square = float((theirs if ours is None else ours - theirs).square().sum())
            worst[shard] = worst_of((worst.get(shard, 0.0), square))
        difference = math.inf if evidence.missing[name] else sum(worst.values())
        size = 0.0 if whole is None else float(whole.square().sum())
        squares.append((difference, size))
        if base_quantity not in evidence.reference.facts.together:
            error = math.sqrt(difference / size if size else difference)
            yield Row(base_quantity, prefix + name, error, evidence.allowed(quantity, step, name), step)
    if base_quantity in evidence.reference.facts.together:
        difference, size = (math.fsum(numbers) for numbers in zip(*squares, strict=True))
        yield Row(
            base_quantity,
            f"{prefix}all parameters",
            math.sqrt(difference / size),
            evidence.allowed(quantity, step, ""),
            step,
        )
