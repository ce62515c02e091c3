"""The kinds of context parallelism: facts for the config and the planner. No torch.

| kind    | attention                                                         | divides                           |
|---------|-------------------------------------------------------------------|-----------------------------------|
| ulysses | whole sequences of some heads a rank, by all-to-all (context.py)  | heads of a tensor rank, sequences |
| ring    | blocks of keys and values go round, partial softmax (ring.py)     | sequences, into two chunks a rank |

One is added by a `ContextKind` and its line in the registry (docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.config.registry import entries
from meshwright.config.section import Rule, can_share, divisors, listed, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config

SIZE = "layout.context.size"


@dataclass(frozen=True)
class ContextKind:
    """How ranks that hold parts of every sequence attend to each other's.

    `context`: `module:attribute` of what a rank's `Context` is made by, of its mesh: torch is not here yet. `chunks`:
    equal runs of a sequence that each rank holds. `documents`: attention can keep to the documents of a sequence.
    `by_heads`: a head sees its whole sequence on one rank. `layout_free`: what makes the `Context` of a run whose bits
    are free of the layout (bits/section.py); "": nothing does.
    """

    context: str
    chunks: int = 1
    documents: bool = False
    by_heads: bool = False
    layout_free: str = ""
    rules: tuple[Rule, ...] = ()
    """Rules on what it does not go with besides, and why; checked where it is chosen."""


@rule("layout.context", "model.family")
def layers_work_token_by_token(config: Config) -> Iterator[Problem]:
    context, family = config.layout.context, config.model.family
    if context.size > 1 and not config.model.cuts_context:
        rule_text = f"cuts sequences, and a {family} looks at whole ones elsewhere than in self-attention"
        yield Problem(SIZE, context.size, rule_text, "1")


@rule("layout.context", "layout.tensor", "model", "data")
def sequences_are_cut_equally(config: Config) -> Iterator[Problem]:
    """Into as many parts as the tensor section cuts what a rank holds, each."""
    context = config.layout.context
    parts = {cut.field: cut.parts for cut in config.layout.tensor.cuts(config)}
    if context.size == 1 or not config.model.cuts_context:
        return
    for length in config.model.sequences(config):
        again = parts.get(length.field, 1)

        cuts = math.lcm(context.strategy.chunks, again)  # of a rank's part
        if length.number % (context.size * cuts):
            parts_text = f"{context.size * context.strategy.chunks} equal parts"
            rule_text = f"does not cut {length.field}={length.number}{length.note} into {parts_text}"
            rule_text += f", and a rank's into {again} for layout.tensor" if again > 1 else ""
            sizes = [size for size in divisors(length.number) if size == 1 or length.number % (size * cuts) == 0]
            valid = f"{listed(sizes)}; or a multiple of {context.size * cuts} tokens"
            yield Problem(SIZE, context.size, rule_text, valid, length.reads)


@rule("layout.context", "layout.tensor", "model")
def heads_are_dealt_equally(config: Config) -> Iterator[Problem]:
    """Key-value heads that are fewer than ranks are copied for all to have one, and each has some of its queries."""
    context, (field, heads, members, _) = config.layout.context, config.model.branches
    parts = {cut.field: cut.parts for cut in config.layout.tensor.cuts(config)}.get(field, 1)
    if context.size == 1 or not can_share(heads, members, parts):
        return
    own, queries = max(heads // parts, 1), members // max(parts // heads, 1)
    if not can_share(own, queries, context.size):
        share = f" / {parts} of a tensor rank" if parts > 1 else ""
        rule_text = f"does not divide {field}={heads}{share}, which kind={context.kind} deals out inside of attention"
        valid = [size for size in divisors(own * queries) if can_share(own, queries, size)]
        yield Problem(SIZE, context.size, rule_text, listed(valid))


@rule("layout.context", "model.dropout")
def rings_drop_nothing(config: Config) -> Iterator[Problem]:
    context, dropout = config.layout.context, config.model.dropout
    if context.size > 1 and dropout:
        rule_text = f"draws no dropout inside of attention, as model.dropout={dropout} asks"
        valid = ", ".join(name for name, kind in entries("contexts").items() if rings_drop_nothing not in kind.rules)
        yield Problem("layout.context.kind", context.kind, rule_text, f"{valid}, or model.dropout=0")


CUTTING = (layers_work_token_by_token, sequences_are_cut_equally)
"""Rules of every kind."""

ULYSSES = ContextKind(
    "meshwright.compute.context.context:Ulysses", documents=True, by_heads=True,
    layout_free="meshwright.compute.context.context:Ulysses", rules=(*CUTTING, heads_are_dealt_equally),
)  # fmt: skip
"""Whole sequences of some heads a rank inside of attention, by all-to-all (DeepSpeed-Ulysses)."""
RING_ATTENTION = ContextKind(
    "meshwright.compute.context.ring:RingAttention", chunks=2, documents=True,
    layout_free="meshwright.compute.bits.runs:GatheredRing", rules=(*CUTTING, rings_drop_nothing),
)  # fmt: skip
"""Blocks of keys and values go round, with a partial softmax each: any number of heads (Ring Attention)."""
