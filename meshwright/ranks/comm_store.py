"""Rendezvous of a job's ranks at one TCPStore, before a process group exists.

Rank 0, or torchrun's agent, opens the store at (address, port). All other ranks connect. If rank 0's store serves other
hosts, each connection begins with a proof of the job's secret (relay.py).

| key         | written by                    | value                                                     |
|-------------|-------------------------------|-----------------------------------------------------------|
| leader      | rank 0                        | the job, rank 0's host, number of ranks; NAME, random hex |
| NAME/came/R | rank R, once                  | the `Peer` of rank R: host, address, device               |
| NAME/all    | rank 0, after all NAME/came/R | the `Peer` of every rank                                  |

torchrun's store outlives a failed attempt, with its keys. The number of the attempt cannot tell old keys from new: each
agent counts only local failures, so the numbers of two nodes differ. NAME can. A rank that registered under the NAME of
a dead rank 0 is missing from the next rank 0's list, and reads `leader` again. A rank of another job that was given the
same port raises LaunchError.

Waits end after the caller's limit, with a LaunchError of one sentence. Signals are not caught: SIGTERM ends a waiting
rank.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.ranks import relay
from meshwright.ranks.environment import Environment, Rendezvous, starts_mpi
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.hang import names_of
from meshwright.ranks.listening import (
    address_to_listen,
    has_secret,
    known_secret,
    listener_at,
    listening_store,
    new_secret,
)
from meshwright.ranks.peers import LOOPBACK, Peer, Peers

_PAUSE_SECONDS = 0.1
"""Seconds between two attempts to reach a store that is not open yet."""
_MOST_PAUSE_SECONDS = 0.25
"""Largest number of seconds between two polls for the last rank: a thousand ranks may poll one store."""
_NAMED = re.compile(r"rank (\d+) on ")
_MOST_BYTES = 2**16
_DOUBLE_SECONDS = 5.0
"""Seconds that a rank with an already registered number waits for the rank 0 of a new attempt."""


def join_job(
    environment: Environment, point: Rendezvous, seconds: float, device: str = "cpu"
) -> tuple[dist.Store, Peers]:
    """Join the job; return its store and the addresses of all ranks after all have registered.

    Args:
        environment: this rank, numbered by the launcher.
        point: address and port of the store.
        seconds: limit of each wait.
        device: type of device on which this rank computes.

    Raises:
        LaunchError: names missing ranks, or a rank on another type of device than rank 0's.
    """
    try:
        # Resolve the name first: `connect` would wait for an unknown host as for one that is not up yet.
        socket.getaddrinfo(point.address, point.port)
    except OSError as error:
        rule = f"MASTER_ADDR={point.address} is not a host that {socket.gethostname()} knows ({error.strerror})"
        raise LaunchError(f"{rule}: set it to the name or address of rank 0's host") from error
    if environment.local_world_size == environment.world_size and not point.hosted:
        point = replace(point, address=LOOPBACK)  # all ranks are on this host
    me = _Comer(environment, point, seconds, device)
    if environment.rank == 0 and not point.hosted:
        shared, mine = me.open_store(), Peer.connected(environment.rank, None)
    else:
        shared, mine = me.connect()
    try:
        mine = replace(mine, device=device, attempt=environment.attempt)
        store, ranks = (me.lead if environment.rank == 0 else me.follow)(shared, mine)
    except dist.DistNetworkError as error:
        raise LaunchError(f"{me} lost the store at {me.place}: the job's rank 0 has left") from error
    if outlier := next((peer for peer in ranks if peer.device != ranks[0].device), None):
        first = f"rank 0 on {ranks[0].host} computes on {ranks[0].device}"
        rule = "set device, and see that every host shows its GPUs"
        raise LaunchError(f"rank {outlier.rank} on {outlier.host} computes on {outlier.device}, {first}: {rule}")
    return store, Peers(ranks, environment.rank)


@dataclass(frozen=True)
class _Comer:
    """A rank that is joining its job."""

    environment: Environment
    point: Rendezvous
    seconds: float
    device: str
    blind: list[int] = field(default_factory=list)
    """At most one descriptor: the gate writes to it the names of ranks that cannot read the job's secret."""

    def __str__(self) -> str:
        return f"rank {self.environment.rank} on {socket.gethostname()}"

    @property
    def place(self) -> str:
        return f"{self.point.address}:{self.point.port}"

    @property
    def elsewhere(self) -> str:
        """A hint on missing ranks: under mpirun, `auto` chooses MPI on a host without GPUs. Empty for a CPU rank."""
        if self.device == "cpu" or not starts_mpi():
            return ""
        return ". A rank that finds no GPU waits in MPI instead: set device, and see that every host shows its GPUs"

    @property
    def far(self) -> bool:
        """True if ranks on other hosts connect to a store that rank 0 opens; under torchrun the agent opens a store."""
        return self.environment.local_world_size < self.environment.world_size and not self.point.hosted

    @property
    def unshared(self) -> str:
        """The remedy for ranks that cannot read the job's secret, a file in the run's folder."""
        out = self.environment.status_folder
        assert out is not None, "a secret without a file is MESHWRIGHT_SECRET's"
        return (
            f"not see what rank 0 writes to {out.parent}: --out must be a folder that all hosts share; no step was made"
        )

    def open_store(self) -> dist.Store:
        """Open the store. It listens only at the address that the other ranks connect to."""
        patience = timedelta(seconds=self.seconds)
        try:
            secret, name = new_secret(self.environment.status_folder) if self.far else (b"", "")
            if not secret:
                address = address_to_listen(self.point.address) if self.far else self.point.address
                return listening_store(address, self.point.port, patience)
            listener = listener_at(address_to_listen(self.point.address), self.point.port)
            store = listening_store(LOOPBACK, 0, patience)
            self.blind.append(relay.start("gate", listener, LOOPBACK, store.port, secret, name))
            return store
        except (OSError, dist.DistNetworkError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            reason = "is taken, perhaps by another job" if taken else str(error)
            text = f"{self} cannot open port {self.point.port}: it {reason}; set MASTER_PORT to a free one"
            raise LaunchError(text) from error

    def connect(self) -> tuple[dist.Store, Peer]:
        """Connect to the store; return the store and this rank's `Peer`.

        Polls the port before torch connects, since torch's own wait prints a C++ stack for each failed attempt.
        """
        end, shared, blind = time.monotonic() + self.seconds, self.environment.status_folder, False
        guarded, secret = self.far and has_secret(shared), b""
        while True:
            try:
                with socket.create_connection((self.point.address, self.point.port), timeout=self.seconds) as way:
                    mine = Peer.connected(self.environment.rank, way)
                    if not guarded:
                        break
                    name, nonce = relay.greeted(way)
                    try:
                        secret = known_secret(shared, name)
                    except OSError:
                        blind = True
                        relay.tell_blind(way, str(self))
                        raise
                    if relay.admitted(way, secret, nonce):
                        break
                cause: object = "it has another secret than rank 0"
                asks = "is MESHWRIGHT_SECRET the same on all hosts"
            except relay.NoGateError as error:
                raise self._stranger() from error
            except OSError as error:
                cause = error.strerror or error
                asks = "has rank 0 started, and do MASTER_ADDR and MASTER_PORT name its host and a port it can open"
            if time.monotonic() > end:
                if blind:
                    raise LaunchError(f"{self} does {self.unshared}")
                text = f"{self} found nobody at {self.place} within {self.seconds:g} s ({cause})"
                raise LaunchError(f"{text}: {asks}?{self.elsewhere}")
            time.sleep(_PAUSE_SECONDS)
        address, port = self.point.address, self.point.port
        try:
            if guarded:
                listener = listener_at(LOOPBACK, 0)
                here = listener.getsockname()[1]
                relay.start("client", listener, address, port, secret)
                address, port = LOOPBACK, here
            patience = timedelta(seconds=self.seconds)
            return dist.TCPStore(address, port, timeout=patience, wait_for_workers=False), mine
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise self._stranger() from error

    def _stranger(self) -> LaunchError:
        text = f"what listens at {self.place} does not answer {self} as a job's rank 0 would"
        return LaunchError(f"{text}: set MASTER_PORT to a free port, the same for all ranks")

    def lead(self, shared: dist.Store, mine: Peer) -> tuple[dist.Store, list[Peer]]:
        """Publish rank 0's NAME, wait until all ranks have registered, and publish the list of all peers."""
        name, ranks = secrets.token_hex(8), range(self.environment.world_size)
        store = dist.PrefixStore(name, shared)
        store.set("came/0", mine.to_json())
        # Publish the name last, so that a rank that reads the name finds rank 0 registered under it.
        job = {"name": name, "job": self.point.job, "host": socket.gethostname(), "ranks": len(ranks)}
        shared.set("leader", json.dumps(job))
        try:
            store.wait([f"came/{rank}" for rank in ranks], timedelta(seconds=self.seconds))
        except dist.DistStoreError as error:
            raise self._missing(store) from error
        came = [store.get(f"came/{rank}").decode() for rank in ranks]
        store.set("all", json.dumps(came))
        return store, [Peer.from_json(text) for text in came]

    def follow(self, shared: dist.Store, mine: Peer) -> tuple[dist.Store, list[Peer]]:
        """Register with rank 0, and with each later rank 0, until the list of one contains this rank's `Peer`."""
        text, end, pause, rank = mine.to_json(), time.monotonic() + self.seconds, _PAUSE_SECONDS / 4, mine.rank
        name, doubles_until = "", end
        while True:
            if (leader := self._leader(shared))["name"] != name:
                name, doubles_until = leader["name"], end
                store = dist.PrefixStore(name, shared)
                if store.add(f"times/{rank}", 1) == 1:
                    store.set(f"came/{rank}", text)
                else:  # Registered before, in this attempt or in a dead one. The latter gets a new rank 0 soon.
                    doubles_until = min(end, time.monotonic() + _DOUBLE_SECONDS)
            # The list of another attempt does not contain this rank's `Peer`: read `leader` again.
            began = store.check(["all"])
            if began and (came := json.loads(store.get("all")))[rank] == text:
                return store, [Peer.from_json(each) for each in came]
            if time.monotonic() > (end if began else doubles_until):
                if not began and doubles_until == end:
                    raise self._missing(store)
                double = f"{self} is the second rank {rank} that came to {self.place}"
                raise LaunchError(f"{double}: is the same run started twice?")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)

    def _leader(self, shared: dist.Store) -> dict[str, Any]:
        """Read rank 0's description of its job. Raises LaunchError if the description is another job's."""
        try:
            theirs: dict[str, Any] = json.loads(shared.get("leader"))
        except dist.DistStoreError as error:
            raise LaunchError(f"{self} waits at {self.place}, but rank 0 has not come") from error
        job, ranks = self.point.job, self.environment.world_size
        if (theirs["job"], theirs["ranks"]) != (job, ranks):
            mine = f"{self} is of {job or 'a nameless job'} ({ranks} ranks)"
            leader_job = f"{theirs['job'] or 'a nameless job'} ({theirs['ranks']} ranks)"
            rule = "give each job a MASTER_PORT of its own, and all ranks of a job the same --out"
            raise LaunchError(f"{mine}, but rank 0 on {theirs['host']}, at {self.place}, of {leader_job}: {rule}")
        return theirs

    def _missing(self, store: dist.Store) -> LaunchError:
        ranks = range(self.environment.world_size)
        came = [rank for rank in ranks if store.check([f"came/{rank}"])]
        who = names_of(came, lambda rank: f"{rank} on {Peer.from_json(store.get(f'came/{rank}').decode()).host}")
        for gate in self.blind:
            with suppress(BlockingIOError):
                told = {*os.read(gate, _MOST_BYTES).decode(errors="replace").splitlines()}
                blind = sorted(name for name in told if (found := _NAMED.match(name)) and int(found[1]) not in came)
                if blind:
                    return LaunchError(f"{names_of(blind)} does {self.unshared}")
        missing = names_of([rank for rank in ranks if rank not in came])
        within = f"within {self.seconds:g} s (timeout.join)"
        counts = f"{len(came)} of {len(ranks)} ranks came to {self.place} {within}: rank {who}"
        return LaunchError(f"{counts}; missing: rank {missing}{self.elsewhere}")
