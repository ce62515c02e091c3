"""Ledger: a rank's calls and sent bytes, by axis and verb. Arithmetic only: planned ranks have a ledger too.

VERBS gives each verb's receivers and message sizes. Comms count with VERBS, the planner derives the messages that stay
on a node from VERBS (planner/plan/network.py), and a cluster file uses the keys of VERBS. A collective is counted in
the bandwidth-optimal form, whatever the library sends; S is the whole payload, n the number of ranks:

| verb                                   | a rank sends                              |
|----------------------------------------|-------------------------------------------|
| all-reduce                             | 2 (n-1)/n S                               |
| reduce-scatter, all-gather, all-to-all | (n-1)/n S                                 |
| broadcast, scatter                     | the root (n-1) S, (n-1)/n S; the others 0 |
| reduce, gather                         | the root 0; the others S, S/n             |
| send (of a ring, too), message         | S                                         |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["to each", "from root", "to root", "to one"]


@dataclass(frozen=True)
class Verb:
    """A verb's messages. `parts`: True if a message holds 1/n of the payload, False for all. `passes`: messages to
    each receiver."""

    direction: Direction
    parts: bool = False
    passes: int = 1

    def sent_bytes(self, payload_bytes: int, size: int, is_root: bool) -> int:
        """Return the bytes that a rank of a group of `size` sends in a call, rounded down."""
        # A root receives a gather and sends a broadcast; the others do the opposite.
        if self.direction == ("to root" if is_root else "from root"):
            return 0
        receivers = size - 1 if self.direction in ("to each", "from root") else 1
        # Multiply, then divide: a payload that the ranks do not divide is rounded once, not once a receiver.
        return self.passes * receivers * payload_bytes // (size if self.parts else 1)


MESSAGE = "message"
"""The verb of a mailbox: a pipeline's message to a neighbour."""

HOST, TO_HOST, FROM_HOST = "host", "copy to host", "copy from host"
"""Names in place of axes and verbs for a planned rank's copies between device and host memory. Nothing is sent."""

VERBS: dict[str, Verb] = {
    "all_reduce": Verb("to each", parts=True, passes=2),  # a reduce-scatter and an all-gather
    "reduce_scatter": Verb("to each", parts=True),
    "all_gather": Verb("to each", parts=True),
    "all_to_all": Verb("to each", parts=True),
    "broadcast": Verb("from root"),
    "reduce": Verb("to root"),
    "gather": Verb("to root", parts=True),
    "scatter": Verb("from root", parts=True),
    "send": Verb("to one"),
    MESSAGE: Verb("to one"),
}


@dataclass
class Traffic:
    """Calls of one verb and the bytes this rank sent in them.

    `by_peer`: the same by named member: a root by its index, a receiver by its distance in the group.
    """

    calls: int = 0
    sent_bytes: int = 0
    by_peer: defaultdict[int, Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    def scaled(self, times: int) -> Traffic:
        """Return this traffic times `times`, including `by_peer`."""
        peers = {peer: peer_traffic.scaled(times) for peer, peer_traffic in self.by_peer.items()}
        return Traffic(times * self.calls, times * self.sent_bytes, defaultdict(Traffic, peers))

    def include(self, traffic: Traffic) -> None:
        """Add another traffic's calls and bytes."""
        self.calls += traffic.calls
        self.sent_bytes += traffic.sent_bytes
        for peer, peer_traffic in traffic.by_peer.items():
            self.by_peer[peer].include(peer_traffic)


@dataclass
class Ledger:
    """This rank's sends by axis and verb."""

    traffic: defaultdict[tuple[str, str], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    times: int = 1
    """Multiplies whatever is recorded (see `repeated`)."""

    def record(self, axis: str, verb: str, sent_bytes: int, peer: int | None = None) -> None:
        """Count a call. `peer`: see `Traffic.by_peer`."""
        entry = self.traffic[axis, verb]
        for counted in (entry,) if peer is None else (entry, entry.by_peer[peer]):
            counted.calls += self.times
            counted.sent_bytes += self.times * sent_bytes

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each call `times` times inside the context, so that a plan runs one of many equal passes."""
        # Multiplied, since contexts nest: microbatches within steps.
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes sent so far, by axis."""
        totals: defaultdict[str, int] = defaultdict(int)
        for (axis, _), entry in self.traffic.items():
            totals[axis] += entry.sent_bytes
        return dict(totals)
