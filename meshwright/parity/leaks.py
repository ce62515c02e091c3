"""The leak probe: change one position of most samples, and count outputs that change but must not.

The reference shows which outputs depend on a changed position: later positions under a causal mask, and positions of
the same document if several documents are packed into a row. On the ranks only the same elements may change. Any other
changed element depends on a later token, another document, or another row. In half precision rounding hides a small
leak from comparisons, but not from this probe: elements that must not change keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.parity.gradients import MODEL, Mistake, near
from meshwright.parity.judge import Evidence, ModuleLine
from meshwright.parity.parts import PADDING, Part
from meshwright.parity.record import COARSE, PROBES, SideRecord

MOST_MOVE = 0.9
"""A mistake is a leak only if at least this share of the reference's changed elements also change on the ranks. Rows in
another order change elsewhere, without a leak."""


def leak_finding(evidence: Evidence) -> Mistake | None:
    """Find the first module in forward order with outputs that change but must not; None without a probe."""
    if not evidence.reference.facts.probe or not all(side.facts.probed for side in evidence.ranks):
        return None
    for line in evidence.modules:
        leaked, still, rank, element = 0, 0, 0, (0, 0)
        for holder, moved, theirs in _movements(evidence, line):
            expected = moved[theirs]
            if expected.numel() and float(expected.double().mean()) < MOST_MOVE:
                leaked = 0
                break
            wrong = moved & ~theirs
            still += int((~theirs).sum())
            if bool(wrong.any()) and not leaked:
                rank, element = holder, (*wrong.nonzero()[0].tolist(),)
            leaked += int(wrong.sum())
        # If nearly all elements change, also in rows that were not changed, rows are in another order: no leak.
        if 0 < leaked <= MOST_MOVE * still:
            row, position = element
            text = (
                f"{leaked} of {still} positions of the output of {line.name or 'the model'} that must not move do so "
                f"when other tokens change (rank {rank}, its row {row}, its position {position}): they see later "
                "tokens, or those of another document or row"
            )
            return Mistake("leak", line.name or MODEL, text)
    return None


def _movements(evidence: Evidence, line: ModuleLine) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (rank, changed elements of the rank's output, changed elements of the reference): bool [rows, places]."""
    whole = [_probed(evidence.reference, line, evidence, at) for at in PROBES]
    if whole[0] is None or whole[1] is None or whole[0].shape != whole[1].shape:
        return
    shape = tuple(evidence.reference.facts.batch[evidence.reference.facts.probe][:2])
    if tuple(whole[0].shape[:2]) != shape:
        return
    moves = (whole[0] != whole[1]).flatten(2).any(2)
    size = float(whole[0].square().mean().sqrt())
    dtype = evidence.reference.facts.dtype
    # An element that must not change is computed from equal numbers in equal order: it changes by a few roundings.
    allowed = (
        4 * torch.finfo(vars(torch)[dtype]).eps if dtype in COARSE else near(evidence.allowed("output", 1, line.name))
    )
    allowed *= size
    for rank, side in enumerate(evidence.ranks):
        tree = side.facts.rows.get(evidence.reference.facts.probe)
        before, after = (_probed(side, line, evidence, at) for at in PROBES)
        if tree is None or before is None or after is None or before.shape != after.shape:
            continue
        pairs = zip(Part.from_json(tree).index[:2], shape, strict=True)
        indices = [list(range(n)) if i is None else [j for j in i if j != PADDING] for i, n in pairs]
        theirs = moves[indices[0]][:, indices[1]]
        if tuple(before.shape[:2]) == tuple(theirs.shape):
            yield rank, ((before - after).abs() > allowed).flatten(2).any(2), theirs


def _probed(side: SideRecord, line: ModuleLine, evidence: Evidence, at: str) -> Tensor | None:
    """Return one side's output of a module in a pass of the probe, as [rows, positions, ...]."""
    calls = evidence.reference.num_calls(line.name, at)
    x = side.call("output", line.name, line.call, calls, at=at) if calls else None
    if x is None or x.ndim < 3:
        return None
    # Convolutions have [rows, channels, positions].
    whole = tuple(evidence.reference.facts.batch[evidence.reference.facts.probe][:2])
    theirs = evidence.reference.call("output", line.name, line.call, calls, at=at)
    last = theirs is not None and tuple(theirs.shape[:2]) != whole and (theirs.shape[0], theirs.shape[2]) == whole
    return x.transpose(1, 2) if last else x
