"""The ledger: what a rank has sent, by axis and verb. Arithmetic only, so that a plan keeps one too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Calls of one verb and the bytes that this rank sent through them.

    `by_peer`: the same for each member of the group that a call names: by its index a root, a receiver by how many
    members further on it is.
    """

    calls: int = 0
    sent_bytes: int = 0
    by_peer: defaultdict[int, Traffic] = field(default_factory=lambda: defaultdict(Traffic))

    def add(self, sent_bytes: int, times: int = 1) -> None:
        self.calls += times
        self.sent_bytes += times * sent_bytes

    def scaled(self, times: int) -> Traffic:
        """So many times as much, by peer as well."""
        peers = {peer: part.scaled(times) for peer, part in self.by_peer.items()}
        return Traffic(times * self.calls, times * self.sent_bytes, defaultdict(Traffic, peers))

    def include(self, other: Traffic) -> None:
        """Add another's."""
        self.calls += other.calls
        self.sent_bytes += other.sent_bytes
        for peer, part in other.by_peer.items():
            self.by_peer[peer].include(part)


@dataclass
class Ledger:
    """This rank's sends by axis and verb.

    A library's collective is counted as its bandwidth-optimal form sends it, S being the whole payload: all-reduce
    2(n-1)/n S, reduce-scatter, all-gather and all-to-all (n-1)/n S, broadcast and scatter at the root, reduce and
    gather at the others. Rounded down to bytes.
    """

    traffic: defaultdict[tuple[str, str], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    times: int = 1
    """Everything that happens now is counted so many times."""

    def record(self, axis: str, verb: str, sent_bytes: int, peer: int | None = None) -> None:
        """Count a call. `peer`: see `Traffic.by_peer`."""
        entry = self.traffic[axis, verb]
        entry.add(sent_bytes, self.times)
        if peer is not None:
            entry.by_peer[peer].add(sent_bytes, self.times)

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """One pass through the context stands for `times`: a plan need not go through all that are alike."""
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent so far, by axis."""
        totals: defaultdict[str, int] = defaultdict(int)
        for (axis, _), entry in self.traffic.items():
            totals[axis] += entry.sent_bytes
        return dict(totals)
