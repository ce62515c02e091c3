"""Which ranks share a node, and which messages of a ledger stay inside of nodes (SUPER, IPDPS 2021, equations 4 to 7).

Ranks fill nodes in order: rank r is on node r // ranks_per_node. A collective is counted as if every rank that has
something for another sent it there; libraries send along trees and rings instead, whose edges they choose themselves.
As in the paper, a rank's part for itself counts as a message inside of its node (of no bytes). VERBS (ranks/ledger.py)
says whom a verb's messages go to.

So of one split by n ranks in g sub-grids, n_g = n/g, with n_node ranks a node, where the one divides the other:

| branch    | inside                                     | between                                         |
|-----------|--------------------------------------------|-------------------------------------------------|
| outermost | n (n_g >= n_node), n_node g (n_g <= n_node) | n(g-1) (n_g >= n_node), (n-n_node)g (otherwise) |
| innermost | n g (g <= n_node), n n_node (otherwise)     | 0 (g <= n_node), n(g-n_node) (otherwise)        |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import VERBS, Traffic


@dataclass(frozen=True)
class Volume:
    """Messages and bytes inside of nodes, and between them."""

    messages_inside: int = 0
    messages_between: int = 0
    bytes_inside: int = 0
    bytes_between: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            self.messages_inside + other.messages_inside,
            self.messages_between + other.messages_between,
            self.bytes_inside + other.bytes_inside,
            self.bytes_between + other.bytes_between,
        )


@dataclass(frozen=True)
class Topology:
    """A job's ranks on its nodes. The last node may have fewer."""

    grid: Grid
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.grid.world_size // self.ranks_per_node)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def volumes(self, rank: int, traffic: Mapping[tuple[str, str], Traffic]) -> dict[tuple[str, str], Volume]:
        """A rank's ledger by axis and verb, split into inside and between."""
        return {(axis, verb): self._volume(rank, axis, verb, entry) for (axis, verb), entry in traffic.items()}

    def total(self, rank: int, traffic: Mapping[tuple[str, str], Traffic]) -> Volume:
        """The sum over axes and verbs."""
        return total(list(self.volumes(rank, traffic).values()))

    def _volume(self, rank: int, axis: str, verb: str, entry: Traffic) -> Volume:
        ranks = self.grid.group(rank, *axis.split("+"))
        index = ranks.index(rank)
        direction = VERBS[verb].direction
        if direction == "to each":
            return self._to_each(rank, ranks, entry.calls * VERBS[verb].passes, entry.sent_bytes)
        parts = []
        for peer, part in entry.by_peer.items():
            if direction == "to one":
                parts.append(self._to_one(rank, ranks[(index + peer) % len(ranks)], part))
            elif direction == "to root":
                parts.append(self._to_one(rank, ranks[peer], part))
            elif peer == index:
                parts.append(self._to_each(rank, ranks, part.calls, part.sent_bytes))
        return total(parts)

    def _to_each(self, rank: int, ranks: Sequence[int], messages: int, sent_bytes: int) -> Volume:
        """The volume of so many messages to each of the ranks, bytes in equal parts to all but itself."""
        elsewhere = sum(self.node(member) != self.node(rank) for member in ranks)
        between = sent_bytes * elsewhere // (len(ranks) - 1)
        return Volume(messages * (len(ranks) - elsewhere), messages * elsewhere, sent_bytes - between, between)

    def _to_one(self, rank: int, receiver: int, part: Traffic) -> Volume:
        if self.node(receiver) == self.node(rank):
            return Volume(messages_inside=part.calls, bytes_inside=part.sent_bytes)
        return Volume(messages_between=part.calls, bytes_between=part.sent_bytes)


def total(volumes: Sequence[Volume]) -> Volume:
    """Their sum."""
    return reduce(Volume.__add__, volumes, Volume())
