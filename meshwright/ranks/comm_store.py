"""The store at which the ranks of a job meet, before there is a process group: who has come, and who belongs here.

    rank 0, or torchrun's agent, opens a TCPStore at (address, port); everybody else connects
    job            rank 0 says which job this is; a rank of another one, which was given the same port, is turned away
    came/R         a rank says that it is here, on which host and at which address; once
    all came/*     everybody waits for everybody, so that whoever gives up can say who is missing

Everything waits as long as it is told to and then raises LaunchError in a sentence. Nothing here catches signals: a
SIGTERM ends a rank that waits.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from meshwright.environment import Environment, Rendezvous
from meshwright.errors import LaunchError
from meshwright.ranks.hang import names_of
from meshwright.ranks.peers import Peer, Peers

_PAUSE_SECONDS = 0.1
"""Between two attempts to reach a store that is not open yet."""


def join_job(environment: Environment, point: Rendezvous, seconds: float) -> tuple[dist.Store, Peers]:
    """The job's store and where its ranks stand, when all have come. Raises LaunchError that names who has not."""
    me = _Comer(environment, point, seconds)
    try:
        socket.getaddrinfo(point.address, point.port)
    except OSError as error:
        rule = f"MASTER_ADDR={point.address} is not a host that {socket.gethostname()} knows ({error.strerror})"
        raise LaunchError(f"{rule}: set it to the name or address of rank 0's host") from error
    if point.is_server(environment):
        shared, mine = me.open_store(), Peer.connected(environment.rank, None)
    else:
        shared, mine = me.connect()
    # A fresh prefix for each attempt: after a restart the store still holds the dead attempt's keys.
    store = dist.PrefixStore(f"attempt-{environment.attempt}", shared)
    try:
        # The job is asked for first, so that a rank of another one leaves before it counts as one of this one's.
        me.check_job(store)
        me.come(store, mine)
        ranks = me.wait_for_all(store)
    except dist.DistNetworkError as error:
        raise LaunchError(f"{me} lost the store at {me.place}: the job's rank 0 has left") from error
    return store, Peers(ranks, environment.rank)


@dataclass(frozen=True)
class _Comer:
    """A rank on its way into its job."""

    environment: Environment
    point: Rendezvous
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.environment.rank} on {socket.gethostname()}"

    @property
    def place(self) -> str:
        return f"{self.point.address}:{self.point.port}"

    def _tcp_store(self, is_master: bool) -> dist.Store:
        return dist.TCPStore(
            self.point.address,
            self.point.port,
            self.environment.world_size,
            is_master=is_master,
            timeout=timedelta(seconds=self.seconds),
            wait_for_workers=False,
        )

    def open_store(self) -> dist.Store:
        try:
            return self._tcp_store(is_master=True)
        except dist.DistNetworkError as error:
            taken = errno.errorcode[errno.EADDRINUSE] in str(error)
            reason = "is taken, perhaps by another job" if taken else str(error)
            text = f"{self} cannot open port {self.point.port}: it {reason}; set MASTER_PORT to a free one"
            raise LaunchError(text) from error

    def connect(self) -> tuple[dist.Store, Peer]:
        """Connect as soon as something listens there. torch's own wait prints a stack of C++ for each attempt."""
        end = time.monotonic() + self.seconds
        while True:
            try:
                with socket.create_connection((self.point.address, self.point.port), timeout=self.seconds) as way:
                    mine = Peer.connected(self.environment.rank, way)
                break
            except OSError as error:
                if time.monotonic() > end:
                    cause = error.strerror or error
                    text = f"{self} found nobody at {self.place} within {self.seconds:g} s ({cause})"
                    rule = "has rank 0 started, and do MASTER_ADDR and MASTER_PORT name its host and a port it can open"
                    raise LaunchError(f"{text}: {rule}?") from error
                time.sleep(_PAUSE_SECONDS)
        try:
            return self._tcp_store(is_master=False), mine
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            text = f"what listens at {self.place} does not answer {self} as a job's rank 0 would"
            raise LaunchError(f"{text}: set MASTER_PORT to a free port, the same for all ranks") from error

    def check_job(self, store: dist.Store) -> None:
        job, ranks = self.point.job, self.environment.world_size
        if self.environment.rank == 0:
            store.set("job", json.dumps({"job": job, "host": socket.gethostname(), "ranks": ranks}))
            return
        try:
            theirs = json.loads(store.get("job"))
        except dist.DistStoreError as error:
            raise LaunchError(f"{self} waits at {self.place}, but rank 0 has not come") from error
        if (theirs["job"], theirs["ranks"]) != (job, ranks):
            mine = f"{self} is of {job or 'a nameless job'} ({ranks} ranks)"
            other = f"{theirs['job'] or 'a nameless job'} ({theirs['ranks']} ranks)"
            rule = "give each job a MASTER_PORT of its own, and all ranks of a job the same --out"
            raise LaunchError(f"{mine}, but rank 0 on {theirs['host']}, at {self.place}, of {other}: {rule}")

    def come(self, store: dist.Store, mine: Peer) -> None:
        rank = self.environment.rank
        if store.add(f"times/{rank}", 1) > 1:
            text = f"{self} is the second rank {rank} that came to {self.place}"
            raise LaunchError(f"{text}: is the same run started twice?")
        store.set(f"came/{rank}", mine.to_json())

    def wait_for_all(self, store: dist.Store) -> list[Peer]:
        ranks = range(self.environment.world_size)
        names = [f"came/{rank}" for rank in ranks]
        try:
            store.wait(names, timedelta(seconds=self.seconds))
            return [Peer.from_json(text.decode()) for text in store.multi_get(names)]
        except dist.DistStoreError as error:
            came = [rank for rank in ranks if store.check([f"came/{rank}"])]
            who = names_of(came, lambda rank: f"{rank} on {Peer.from_json(store.get(names[rank]).decode()).host}")
            missing = names_of([rank for rank in ranks if rank not in came])
            within = f"within {self.seconds:g} s (timeout.join)"
            counts = f"{len(came)} of {len(ranks)} ranks came to {self.place} {within}: rank {who}"
            raise LaunchError(f"{counts}; missing: rank {missing}") from error
