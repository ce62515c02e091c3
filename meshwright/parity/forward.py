"""Finds the first module in forward order with a wrong output: the place and the kind of the mistake.

| first wrong module                                       | mistake                                             |
|----------------------------------------------------------|-----------------------------------------------------|
| output - reference = partial sum - whole sum, of a       | missing reduction: the partial sum was not reduced  |
| module before                                            |                                                     |
| a wrong input                                            | in the code of the parent, or of a parent's parent  |
| slices missing                                           | wrong part                                          |
| a linear's product and bias, each times a number         | scaled                                              |
| the reference's output times a number                    | scaled                                              |
| the output with the weights before the last step         | stale weights (in the second step)                  |
| the rounding of a narrower type                          | lower precision                                     |
| other values                                             | wrong values                                        |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.parity.compare import axis_words, narrow_type, relative_error
from meshwright.parity.explain import COPY, CUT, PARTIAL, axis_subsets, fit, groups_over
from meshwright.parity.gradients import MODEL, Mistake, near
from meshwright.parity.judge import Evidence, ModuleLine
from meshwright.parity.terms import lost_words, rounded_sum, weights_of


def forward_finding(evidence: Evidence, lines: Sequence[ModuleLine], at: str = "") -> Mistake | None:
    """Return the mistake of the first module with a wrong output; None if all outputs are explained.

    Args:
        evidence: the records of both sides.
        lines: the calls of modules in forward order.
        at: the mark of the traced pass.
    """
    for index, line in enumerate(lines):
        if line.output is None or line.output.explained:
            continue
        if (unreduced := _unreduced(evidence, lines, index, at)) is not None:
            return unreduced
        if line.output.leaves_out:
            text = f"the ranks' outputs of {line.name or 'the model'} lack some of its slices, and repeat others"
            return Mistake("wrong part", line.name or MODEL, text)
        if not at and (summed := _summed(evidence, lines, index)) is not None:
            return summed
        if not at and (biased := _linear_finding(evidence, line)) is not None:
            return biased
        if at and (stale := _stale(evidence, line, at)) is not None:
            return stale
        where, child = _outermost(lines, line)
        return _of_values(evidence, line, where, child, at)
    return None


def is_lost(line: ModuleLine) -> bool:
    """Return True if a module's input is not the reference's. A partial sum is explained, but is no whole input."""
    return line.input is not None and (not line.input.explained or line.input.kind == PARTIAL)


def _outermost(lines: Sequence[ModuleLine], line: ModuleLine) -> tuple[str, ModuleLine | None]:
    """Find the module with the code that made a line's wrong input: the nearest enclosing one with a right input.

    Returns:
        (name of the module, the child that first received a wrong input, or None if the line's input is right).
    """
    if not is_lost(line):
        return line.name, None
    by_name = {module.name: module for module in reversed(lines)}
    child, where = line, line.name
    while where:
        where = where.rpartition(".")[0]
        around = by_name.get(where)
        # Module lists compute nothing, so have no line.
        if around is not None and not (where and is_lost(around)):
            return where, child
        child = child if around is None else around
    # A stage of a pipeline: code between two stages has no module, so the second stage is named.
    return child.name, child


def _unreduced(evidence: Evidence, lines: Sequence[ModuleLine], index: int, at: str) -> Mistake | None:
    """Find partial sums before a wrong line that were not reduced."""
    line, tail = lines[index], list[ModuleLine]()
    for earlier in reversed(lines[:index]):
        if earlier.output is None or earlier.output.kind in (COPY, CUT):
            break  # a right whole output: earlier partial sums were reduced
        tail.insert(0, earlier)
    if not tail:
        return _unreduced_product(evidence, lines, index, at)
    # A chain of modules may pass the partial sum on; the first made it.
    source, quantity = tail[0], "input" if is_lost(line) else "output"
    explained = source.output
    assert explained is not None
    ours = evidence.locals_of(quantity, line, at)
    calls = evidence.reference.num_calls(line.name)
    theirs = evidence.reference.call(quantity, line.name, line.call, calls, at=at)
    partials = evidence.locals_of("output", tail[-1], at)
    whole = evidence.reference.call("output", tail[-1].name, tail[-1].call, evidence.reference.num_calls(tail[-1].name),
                                    at=at)  # fmt: skip
    if ours is None or theirs is None or partials is None or whole is None:
        confirmed = is_lost(line)
    else:
        alike = partials[0].shape == whole.shape == ours[0].shape == theirs.shape
        # The error equals the difference of the rank's term and the sum, e.g. after a residual was added to the term.
        lacking = [relative_error(x - theirs, p - whole) for x, p in zip(ours, partials, strict=True)] if alike else [1]
        # Terms differ between ranks. A tensor that is equal on all ranks was reduced, and is wrong for another reason.
        differing = any(relative_error(x, ours[0]) > 1e-3 for x in ours)
        confirmed = max(lacking) < 1e-2 or (is_lost(line) and differing)
    if not confirmed:
        return None
    text = (
        f"{source.name} gives partial sums over {explained.axis}, which {line.name or 'the model'} takes for the whole"
    )
    return Mistake("missing reduction", source.name, f"{text}: an all-reduce is missing")


def _unreduced_product(evidence: Evidence, lines: Sequence[ModuleLine], index: int, at: str) -> Mistake | None:
    """Find a partial product outside of modules that was not reduced.

    The sum of the ranks' wrong inputs is then the reference's input plus (ranks - 1) times the addend of the product:
    an earlier output (and a bias).
    """
    line = lines[index]
    quantity = "input" if is_lost(line) else "output"
    calls = evidence.reference.num_calls(line.name)
    theirs = evidence.reference.call(quantity, line.name, line.call, calls, at=at)
    ours = evidence.locals_of(quantity, line, at)
    if ours is None or theirs is None or theirs.ndim < 2 or ours[0].shape != theirs.shape:
        return None
    for axes in axis_subsets(evidence.coordinates):
        group = groups_over(evidence.coordinates, axes)[0]
        added = (torch.stack([ours[rank] for rank in group]).sum(0) - theirs) / (len(group) - 1)
        for earlier in reversed(lines[:index]):
            if earlier.output is None or earlier.output.kind != COPY:
                continue
            num_calls = evidence.reference.num_calls(earlier.name)
            before = evidence.reference.call("output", earlier.name, earlier.call, num_calls, at=at)
            if before is None or before.shape != added.shape:
                continue
            bias = (added - before).flatten(0, -2).mean(0)
            if relative_error(added - before, bias.expand_as(added)) < 1e-6 or relative_error(added, before) < 1e-6:
                where, _ = _outermost(lines, line)
                text = f"the {quantity} of {line.name or 'the model'} has a term that is a partial sum over"
                return Mistake(
                    "missing reduction", where or MODEL, f"{text} {'+'.join(axes)}: an all-reduce is missing"
                )
    return None


def _summed(evidence: Evidence, lines: Sequence[ModuleLine], index: int) -> Mistake | None:
    """Find an output that is a sum without a rank's term, with a term twice, or with rounded terms.

    The terms are the ranks' outputs of the module before; for a row-parallel linear, the products of the reference's
    input with each rank's part of the weight.
    """
    line = lines[index]
    theirs = evidence.reference.call("output", line.name, line.call, evidence.reference.num_calls(line.name))
    held = evidence.locals_of("output", line)
    if theirs is None or held is None or held[0].shape != theirs.shape:
        return None
    before = lines[index - 1] if index else None
    terms, name, axis = _terms_of_linear(evidence, line), line.name, ""
    if terms is None and before is not None and before.output is not None and before.output.kind == PARTIAL:
        partial = evidence.locals_of("output", before)
        terms = None if partial is None else dict(enumerate(partial))
        name, axis = before.name, before.output.axis
    if terms is None or any(x.shape != theirs.shape for x in terms.values()):
        return None
    allowed = near(evidence.allowed("output", 1, line.name))
    told, narrow = set[tuple[str, str] | None](), set[str]()
    axes = axis.split("+") if axis else [axis for axis, size in evidence.sizes.items() if size > 1]
    for group in groups_over(evidence.coordinates, axes):
        group_terms = {rank: terms[rank] for rank in group if rank in terms}
        words = [f"the term of rank {rank}" for rank in group_terms]
        rest = theirs - torch.stack(list(group_terms.values())).sum(0)
        for rank in group:
            if len(group_terms) < 2 or relative_error(held[rank], theirs) <= allowed:
                continue
            weights = weights_of(held[rank], theirs, list(group_terms.values()), allowed)
            told.add(None if weights is None else lost_words(weights, words))
            dtype = evidence.reference.facts.dtype
            narrow.add(rounded_sum(held[rank], list(group_terms.values()), rest, dtype, allowed))
    made = "output" if name == line.name else f"output, a sum of {name}'s,"
    if len(told) == 1 and (found := told.pop()) is not None:
        return Mistake(found[0], name or MODEL, f"the {made} of {line.name or 'the model'} is {found[1]}")
    if len(narrow) == 1 and (type_name := narrow.pop()):
        text = f"the {made} of {line.name or 'the model'} is that of terms which were rounded to {type_name}"
        return Mistake("lower precision", name or MODEL, text)
    return None


def _terms_of_linear(evidence: Evidence, line: ModuleLine) -> dict[int, Tensor] | None:
    """Return each rank's product [..., out], for a linear that is sharded by input columns; else None."""
    name = f"{line.name}.weight"
    taken = evidence.reference.call("input", line.name, line.call, evidence.reference.num_calls(line.name))
    if taken is None or name not in evidence.names or evidence.weight(name).ndim != 2:
        return None
    weight, terms = evidence.weight(name), dict[int, Tensor]()
    for rank, _, shard in evidence.holders[name]:
        if shard.index[0] is not None or shard.index[1] is None or weight.shape[1] != taken.shape[-1]:
            return None
        columns = list(shard.index[1])
        terms[rank] = taken[..., columns] @ weight[:, columns].T
    return terms


def _stale(evidence: Evidence, line: ModuleLine, at: str) -> Mistake | None:
    """Find a module with an output computed from the weights before the last step."""
    calls = evidence.reference.num_calls(line.name)
    before = evidence.reference.call("earlier-output", line.name, line.call, calls, at=at)
    held = evidence.locals_of("output", line, at)
    if before is None or held is None:
        return None
    allowed = near(evidence.allowed("output", 2, line.name))
    found = [fit(x, before, allowed) for x in held]
    if not any(f is not None and f.error <= allowed for f in found):
        return None
    text = f"the output of {line.name} in the second step is that of its first weights, which were stepped since"
    return Mistake("stale weights", line.name or MODEL, text)


def _of_values(evidence: Evidence, line: ModuleLine, where: str, child: ModuleLine | None, at: str) -> Mistake:
    """Return the mistake in the values of a line's output, or of a child's input."""
    output, name = line.output, line.name or "the model"
    assert output is not None
    step = " in the second step" if at else ""
    made, what = (output, f"the output of {name}") if child is None else (child.input, f"the input of {child.name}")
    if made is not None and made.factor is not None and abs(made.factor - 1) > 1e-4:
        times = f"{made.factor:.4g}{axis_words(evidence.sizes, made.factor)}"
        return Mistake("scaled", where or MODEL, f"{what}{step} is the reference's times {times}")
    narrow = _narrow(evidence, line, at)
    category = "lower precision" if narrow else "wrong values"
    off = f"is off by {output.error:.1e} (allowed: {output.allowed:.1e})"
    if math.isinf(output.error):
        calls = [side.num_calls(line.name, at) for side in evidence.ranks]
        theirs = evidence.reference.num_calls(line.name)
        several = (
            f"; it was called {max(calls)} times where the reference calls it {theirs}" if max(calls) % theirs else ""
        )
        off = f"has another shape than any part of the reference's{several}"
    text = f"the output of {name} on rank {output.rank}{step} {off}"
    if narrow:
        text += f": about what {narrow} rounds by"
    if child is not None:
        text += f"; so is the input of {child.name or 'the model'}, and all before is right"
    return Mistake(category, where or MODEL, text)


def _narrow(evidence: Evidence, line: ModuleLine, at: str) -> str:
    """Return the narrower type with the rounding error of a module's outputs; empty if there is none."""
    calls = evidence.reference.num_calls(line.name)
    whole = evidence.reference.call("output", line.name, line.call, calls, at=at)
    held = [x for side in evidence.ranks if (x := side.call("output", line.name, line.call, calls, at=at)) is not None]
    if whole is None or line.output is None or not held:
        return ""
    found = [(x, f.piece) for x in held if (f := fit(x, whole, 0.0)) is not None]
    return narrow_type([x for x, _ in found], [y for _, y in found], evidence.reference.facts.dtype) if found else ""


def _linear_finding(evidence: Evidence, line: ModuleLine) -> Mistake | None:
    """Find a linear with wrong multiples of product and bias: one rank's product, reduced twice, a bias per rank."""
    if f"{line.name}.bias" not in evidence.names:
        return None
    bias, calls = evidence.weight(f"{line.name}.bias"), evidence.reference.num_calls(line.name)
    whole = evidence.reference.call("output", line.name, line.call, calls)
    ours = evidence.locals_of("output", line)
    if whole is None or ours is None or bias.shape != ours[0].shape[-1:]:
        return None
    # A row-parallel linear with a bias added on each rank: the sum has the product once and one bias per rank.
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
    """Return (multiple of the reference's product, multiple of the bias) in a linear's output; nan if neither fits."""
    found = fit(ours, whole, 0.0)
    if found is None:
        return math.nan, math.nan
    # output = a (x W) + b bias, solved for a and b by least squares.
    terms = torch.stack([(found.piece - bias).flatten(), bias.expand_as(ours).flatten()], 1)
    solved = torch.linalg.lstsq(terms, ours.flatten()[:, None]).solution
    if relative_error((terms @ solved).flatten(), ours.flatten()) > 1e-2:
        return math.nan, math.nan
    return float(solved[0]), float(solved[1])
