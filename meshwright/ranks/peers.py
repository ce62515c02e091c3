"""Peers: each rank's host, and the address from which it reached the job's store.

gloo resolves its own host's name and tells the others to connect to that address. Debian's installer writes `127.0.1.1
HOST` into /etc/hosts, so every host would name itself, and ranks of different hosts never meet. All ranks have just
reached the store, so gloo is given the interface of that connection.
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
"""Linux's question for an interface's IPv4 address."""

_GLOO_PEER = re.compile(r"gloo.*?\[([\da-fA-F.:]+)\]:\d+", re.DOTALL)
_CAUSE = re.compile(r"(Connection \w+(?: by peer)?|Broken pipe|No route to host|timed out|Network is unreachable)")


@dataclass(frozen=True)
class Peer:
    """A rank as registered at the store. `address`: its own end of that connection, `reached`: the store's.

    Both are empty for the rank that opened the store. `device`: the type of what it computes on. `attempt`: the
    restarts that its own launcher has counted. `process`: tells it from the same rank of another attempt.
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
        """This process, by its connection to the store (None: it opened the store)."""
        if connection is None:
            return cls(rank, socket.gethostname())
        own, other = connection.getsockname()[0], connection.getpeername()[0]
        return cls(rank, socket.gethostname(), own, other)

    @property
    def far(self) -> bool:
        """Whether the rank came over a network: other hosts can reach its address."""
        return bool(self.address) and not ip_address(self.address.partition("%")[0]).is_loopback

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Peer:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Peers:
    """All ranks of the job in order, as rank `me` sees them."""

    ranks: Sequence[Peer]
    me: int

    @property
    def attempt(self) -> int:
        """A number that grows with each start of the job: the sum of the ranks' counts. torchrun's agents each count
        failures of their own node, so neither a single count nor the greatest need grow."""
        return sum(peer.attempt for peer in self.ranks)

    @property
    def address(self) -> str:
        """The address at which the others reach this rank; empty where all are on one host.

        A rank on the store's host came by loopback: others reach that host at the store's address.
        """
        far = [peer for peer in self.ranks if peer.far]
        mine = self.ranks[self.me]
        if not far:
            return ""
        # A loopback address is useless to other hosts; an address that one of them has reached serves all.
        return mine.address if mine.far else far[0].reached

    @contextmanager
    def named_when_lost(self) -> Iterator[None]:
        """A context that turns gloo's error on a broken connection into one that names the lost rank."""
        try:
            yield
        except RuntimeError as error:
            # gloo raises nothing narrower. Other errors have no peer's address in their text.
            found, cause = _GLOO_PEER.search(str(error)), _CAUSE.search(str(error))
            if found is None:
                raise
            # A rank on the store's host has the host's address; several ranks may share one.
            at = {peer.rank: peer.address if peer.far else Peers(self.ranks, peer.rank).address for peer in self.ranks}
            there = [peer for peer in self.ranks if at[peer.rank] == found[1] and peer.rank != self.me]
            who = names_of([peer.rank for peer in there], lambda rank: f"rank {rank} on {self.ranks[rank].host}")
            lost = " or ".join(who.split(", ")) if there else f"a rank at {found[1]}"
            why = f"{found[1]}: {cause[0].lower() if cause else 'no reason given'}"
            text = f"lost {lost} ({why}); the message of the rank that left first has the cause"
            raise LostRankError(text) from error


def interface_at(address: str) -> str | None:
    """The name of this host's interface that has the address; None where none has, as behind a NAT."""
    if ":" in address:
        # The kernel's table writes an address as 32 digits without colons, and `%interface` is no part of it.
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
