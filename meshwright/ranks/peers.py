"""Peers: each rank's host, and the address from which the rank reached the job's store.

By default gloo resolves the host's own name and publishes that address to the other ranks. Debian's installer writes
`127.0.1.1 HOST` into /etc/hosts: every host would publish a loopback address, and ranks of different hosts could not
connect. All ranks have just reached the store, so gloo gets the interface of that connection.
"""

from __future__ import annotations

import fcntl
import json
import re
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from pathlib import Path

from meshwright.ranks.errors import LostRankError
from meshwright.ranks.hang import names_of

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915
"""Linux's ioctl request for an interface's IPv4 address."""

_GLOO_PEER = re.compile(r"gloo.*?\[([\da-fA-F.:]+)\]:\d+", re.DOTALL)
_CAUSE = re.compile(r"(Connection \w+(?: by peer)?|Broken pipe|No route to host|timed out|Network is unreachable)")


@dataclass(frozen=True)
class Peer:
    """A rank as registered at the store. `address`: the rank's end of that connection; `reached`: the store's end.

    Both are empty for the rank that opened the store. `device`: type of the rank's device. `attempt`: restarts counted
    by the rank's own launcher. `process`: random, and different for the same rank of another attempt.
    """

    rank: int
    host: str
    address: str = ""
    reached: str = ""
    device: str = "cpu"
    attempt: int = 0
    process: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)

    @classmethod
    def connected(cls, rank: int, connection: socket.socket | None) -> Peer:
        """Describe this process by a connection to the store; None if this process opened the store."""
        if connection is None:
            return cls(rank, socket.gethostname())
        local_address, store_address = connection.getsockname()[0], connection.getpeername()[0]
        return cls(rank, socket.gethostname(), local_address, store_address)

    @property
    def far(self) -> bool:
        """True if the rank connected over a network, so that other hosts can reach the address."""
        return bool(self.address) and not ip_address(self.address.partition("%")[0]).is_loopback

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Peer:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Peers:
    """All ranks of the job in order, and this rank's number `me`."""

    ranks: Sequence[Peer]
    me: int

    @property
    def attempt(self) -> int:
        """The sum of the ranks' counts of restarts, which grows with each start of the job.

        Each agent of torchrun counts failures of one node, so neither a single count nor the greatest need grow.
        """
        return sum(peer.attempt for peer in self.ranks)

    @property
    def address(self) -> str:
        """The address at which other ranks reach this rank; empty if all ranks are on one host.

        A rank on the store's host connected over loopback: others reach that host at the store's address.
        """
        far = [peer for peer in self.ranks if peer.far]
        mine = self.ranks[self.me]
        if not far:
            return ""
        # Other hosts cannot use a loopback address; an address reached by one of them serves all.
        return mine.address if mine.far else far[0].reached

    @contextmanager
    def named_when_lost(self) -> Iterator[None]:
        """Turn gloo's error on a broken connection, inside the context, into an error that names the lost rank."""
        try:
            yield
        except RuntimeError as error:
            # gloo raises no narrower class. Texts of other errors contain no peer's address.
            found, cause = _GLOO_PEER.search(str(error)), _CAUSE.search(str(error))
            if found is None:
                raise
            # A rank on the store's host has that host's address; several ranks may share an address.
            at = {peer.rank: peer.address if peer.far else Peers(self.ranks, peer.rank).address for peer in self.ranks}
            there = [peer for peer in self.ranks if at[peer.rank] == found[1] and peer.rank != self.me]
            who = names_of([peer.rank for peer in there], lambda rank: f"rank {rank} on {self.ranks[rank].host}")
            lost = " or ".join(who.split(", ")) if there else f"a rank at {found[1]}"
            why = f"{found[1]}: {cause[0].lower() if cause else 'no reason given'}"
            text = f"lost {lost} ({why}); the message of the rank that left first has the cause"
            raise LostRankError(text) from error


def interface_at(address: str) -> str | None:
    """Return the name of this host's interface with the address; None if there is none, as behind a NAT."""
    if ":" in address:
        # The kernel's table writes an address as 32 digits without colons and without `%interface`.
        wanted = f"{int(ip_address(address.partition('%')[0])):032x}"
        with suppress(OSError):
            rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((row[-1] for row in rows if row[0] == wanted), None)
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
