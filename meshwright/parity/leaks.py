"""The leak probe: change one position of most samples, and count outputs that must not move but do.

The reference shows which outputs depend on a changed position: later ones under a causal mask, those of the same
document where several are packed into a row. On the ranks the same elements may move, and no others: one that does has
seen a later token, another document, or another row. In half precision too small a leak hides behind rounding, and
shows here all the same, as what must not move keeps its bits.
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
"""The share of what moves on the reference that moves on the ranks as well, where a mistake is a leak: rows that lie
in another order move elsewhere, and see nothing that they must not."""


def leak_finding(evidence: Evidence) -> Mistake | None:
    """The first module in forward order whose outputs move where they must not; None where there was no probe."""
    if not evidence.reference.facts.probe or not all(side.facts.probed for side in evidence.ranks):
        return None
    for line in evidence.modules:
        leaked, still, rank, place = 0, 0, 0, (0, 0)
        for number, moved, theirs in _movements(evidence, line):
            expected = moved[theirs]
            if expected.numel() and float(expected.double().mean()) < MOST_MOVE:
                leaked = 0
                break
            wrong = moved & ~theirs
            still += int((~theirs).sum())
            if bool(wrong.any()) and not leaked:
                rank, place = number, (*wrong.nonzero()[0].tolist(),)
            leaked += int(wrong.sum())
        # Where nearly all moves, also in rows that nobody changed, rows lie in another order: that is no leak.
        if 0 < leaked <= MOST_MOVE * still:
            row, position = place
            text = (
                f"{leaked} of {still} positions of the output of {line.name or 'the model'} that must not move do so "
                f"when other tokens change (rank {rank}, its row {row}, its position {position}): they see later "
                "tokens, or those of another document or row"
            )
            return Mistake("leak", line.name or MODEL, text)
    return None


def _movements(evidence: Evidence, line: ModuleLine) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rank, which of its [rows, positions] of a module's output have moved, and which of them move on the reference."""
    whole = [_probed(evidence.reference, line, evidence, at) for at in PROBES]
    if whole[0] is None or whole[1] is None or whole[0].shape != whole[1].shape:
        return
    shape = tuple(evidence.reference.facts.batch[evidence.reference.facts.probe][:2])
    if tuple(whole[0].shape[:2]) != shape:
        return
    moves = (whole[0] != whole[1]).flatten(2).any(2)
    size = float(whole[0].square().mean().sqrt())
    dtype = evidence.reference.facts.dtype
    # What must not move is computed from the same numbers in the same order: but for a few roundings it stays.
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
        own = [list(range(n)) if i is None else [j for j in i if j != PADDING] for i, n in pairs]
        theirs = moves[own[0]][:, own[1]]
        if tuple(before.shape[:2]) == tuple(theirs.shape):
            yield rank, ((before - after).abs() > allowed).flatten(2).any(2), theirs


def _probed(side: SideRecord, line: ModuleLine, evidence: Evidence, at: str) -> Tensor | None:
    """A side's output of a module in a pass of the probe, as [rows, positions, ...]."""
    calls = evidence.reference.num_calls(line.name, at)
    x = side.call("output", line.name, line.call, calls, at=at) if calls else None
    if x is None or x.ndim < 3:
        return None
    # Convolutions have [rows, channels, positions].
    whole = tuple(evidence.reference.facts.batch[evidence.reference.facts.probe][:2])
    theirs = evidence.reference.call("output", line.name, line.call, calls, at=at)
    last = theirs is not None and tuple(theirs.shape[:2]) != whole and (theirs.shape[0], theirs.shape[2]) == whole
    return x.transpose(1, 2) if last else x
