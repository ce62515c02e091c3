"""The kinds of context parallelism: facts for the config and the planner. No torch.

| kind    | attention                                                        | divides                           |
|---------|------------------------------------------------------------------|-----------------------------------|
| ulysses | all-to-all to whole sequences of some heads (context.py)         | heads of a tensor rank, sequences |
| ring    | keys and values sent from rank to rank, partial softmax (ring.py)| sequences, into two chunks a rank |

To add a kind, write a `ContextKind` and one line in the registry (docs/extending.md).
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
    """A kind of attention between ranks that each hold a part of every sequence."""

    context: str
    """`module:attribute` of the factory of a rank's `Context` from a mesh; a string, since torch is not imported."""
    chunks: int = 1
    """Number of equal runs of a sequence on each rank."""
    documents: bool = False
    """True if attention can be limited to the documents of a sequence."""
    by_heads: bool = False
    """True if a rank attends from whole sequences of some heads."""
    layout_free: str = ""
    """The factory (as `context`) under `bits: layout-free` (bits/section.py); "": not supported."""
    rules: tuple[Rule, ...] = ()
    """Rules on combinations with other settings, checked for runs of this kind."""


@rule("layout.context", "model.family")
def layers_work_token_by_token(config: Config) -> Iterator[Problem]:
    context, family = config.layout.context, config.model.family
    if context.size > 1 and not config.model.cuts_context:
        rule_text = f"cuts sequences, and a {family} looks at whole ones elsewhere than in self-attention"
        yield Problem(SIZE, context.size, rule_text, "1")


@rule("layout.context", "layout.tensor", "model", "data")
def sequences_are_cut_equally(config: Config) -> Iterator[Problem]:
    """Require sequences of equal chunks for all ranks. A rank's part must also divide equally by layout.tensor."""
    context = config.layout.context
    parts = {cut.field: cut.parts for cut in config.layout.tensor.cuts(config)}
    if context.size == 1 or not config.model.cuts_context:
        return
    for length in config.model.sequences(config):
        again = parts.get(length.field, 1)

        cuts = math.lcm(context.strategy.chunks, again)  # parts that a rank's share must divide into
        if length.number % (context.size * cuts):
            parts_text = f"{context.size * context.strategy.chunks} equal parts"
            rule_text = f"does not cut {length.field}={length.number}{length.note} into {parts_text}"
            rule_text += f", and a rank's into {again} for layout.tensor" if again > 1 else ""
            sizes = [size for size in divisors(length.number) if size == 1 or length.number % (size * cuts) == 0]
            valid = f"{listed(sizes)}; or a multiple of {context.size * cuts} tokens"
            yield Problem(SIZE, context.size, rule_text, valid, length.reads)


@rule("layout.context", "layout.tensor", "model")
def heads_are_dealt_equally(config: Config) -> Iterator[Problem]:
    """Require equal heads per rank. With more ranks than key-value heads, ranks copy heads and split the queries."""
    context, (field, heads, members, _) = config.layout.context, config.model.branches
    parts = {cut.field: cut.parts for cut in config.layout.tensor.cuts(config)}.get(field, 1)
    if context.size == 1 or not can_share(heads, members, parts):
        return
    local_heads, queries = max(heads // parts, 1), members // max(parts // heads, 1)
    if not can_share(local_heads, queries, context.size):
        share = f" / {parts} of a tensor rank" if parts > 1 else ""
        rule_text = f"does not divide {field}={heads}{share}, which kind={context.kind} deals out inside of attention"
        valid = [size for size in divisors(local_heads * queries) if can_share(local_heads, queries, size)]
        yield Problem(SIZE, context.size, rule_text, listed(valid))


@rule("layout.context", "model.dropout")
def rings_drop_nothing(config: Config) -> Iterator[Problem]:
    context, dropout = config.layout.context, config.model.dropout
    if context.size > 1 and dropout:
        rule_text = f"draws no dropout inside of attention, as model.dropout={dropout} asks"
        valid = ", ".join(
            name for name, strategy in entries("contexts").items() if rings_drop_nothing not in strategy.rules
        )
        yield Problem("layout.context.kind", context.kind, rule_text, f"{valid}, or model.dropout=0")


CUTTING = (layers_work_token_by_token, sequences_are_cut_equally)
"""Rules of every kind."""

ULYSSES = ContextKind(
    "meshwright.compute.context.context:Ulysses", documents=True, by_heads=True,
    layout_free="meshwright.compute.context.context:Ulysses", rules=(*CUTTING, heads_are_dealt_equally),
)  # fmt: skip
"""An all-to-all before attention gives each rank whole sequences of some heads (DeepSpeed-Ulysses)."""
RING_ATTENTION = ContextKind(
    "meshwright.compute.context.ring:RingAttention", chunks=2, documents=True,
    layout_free="meshwright.compute.bits.runs:GatheredRing", rules=(*CUTTING, rings_drop_nothing),
)  # fmt: skip
"""Keys and values are sent in blocks from rank to rank, with a partial softmax; for any number of heads (Ring
Attention)."""
