"""The store at which the ranks of a job meet, before there is a process group: who has come, and who belongs here.

    rank 0, or torchrun's agent, opens a TCPStore at (address, port); everybody else connects
    job            rank 0 says which job this is; a rank of another one, which was given the same port, is turned away
    came/R         a rank says that it is here, and on which host; once
    all came/*     everybody waits for everybody, so that whoever gives up can say who is missing

Everything waits as long as it is told to and then raises LaunchError in a sentence. Nothing here catches signals: a
SIGTERM ends a rank that waits.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from meshwright.environment import Environment, Rendezvous
from meshwright.errors import LaunchError

_PAUSE_SECONDS = 0.1
"""Between two attempts to reach a store that is not open yet."""

_MOST_NAMED = 16
"""Ranks in a sentence."""


def join_job(environment: Environment, point: Rendezvous, seconds: float) -> dist.Store:
    """The job's store, when all of its ranks have come to it. Raises LaunchError that names those who have not."""
    patience = timedelta(seconds=seconds)
    _resolve(point)
    if point.is_server(environment):
        shared = _open(environment, point, patience)
    else:
        _wait_for_server(environment, point, seconds)
        shared = _connect(environment, point, patience)
    # A fresh prefix for each attempt: after a restart the store still holds the dead attempt's keys.
    store = dist.PrefixStore(f"attempt-{environment.attempt}", shared)
    try:
        _check_job(store, environment, point)
        _come(store, environment, point)
        _wait_for_all(store, environment, point, patience)
    except dist.DistNetworkError as error:
        raise LaunchError(f"{_me(environment)} lost the store at {_at(point)}: the job's rank 0 has left") from error
    return store


def _me(environment: Environment) -> str:
    return f"rank {environment.rank} on {socket.gethostname()}"


def _at(point: Rendezvous) -> str:
    return f"{point.address}:{point.port}"


def _resolve(point: Rendezvous) -> None:
    try:
        socket.getaddrinfo(point.address, point.port)
    except OSError as error:
        rule = f"MASTER_ADDR={point.address} is not a host that {socket.gethostname()} knows ({error.strerror})"
        raise LaunchError(f"{rule}: set it to the name or address of rank 0's host") from error


def _open(environment: Environment, point: Rendezvous, patience: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(
            point.address, point.port, environment.world_size, is_master=True, timeout=patience, wait_for_workers=False
        )
    except dist.DistNetworkError as error:
        reason = "is taken, perhaps by another job" if errno.errorcode[errno.EADDRINUSE] in str(error) else str(error)
        text = f"{_me(environment)} cannot open port {point.port}: it {reason}; set MASTER_PORT to a free one"
        raise LaunchError(text) from error


def _wait_for_server(environment: Environment, point: Rendezvous, seconds: float) -> None:
    """Until something listens there. torch's own wait prints a stack of C++ for each attempt."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((point.address, point.port), timeout=seconds).close()
        except OSError as error:
            if time.monotonic() > end:
                text = (
                    f"{_me(environment)} found nobody at {_at(point)} within {seconds:g} s ({error.strerror or error})"
                )
                rule = "has rank 0 started, and do MASTER_ADDR and MASTER_PORT name its host and a port it can open?"
                raise LaunchError(f"{text}: {rule}") from error
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _connect(environment: Environment, point: Rendezvous, patience: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(
            point.address, point.port, environment.world_size, is_master=False, timeout=patience, wait_for_workers=False
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = f"what listens at {_at(point)} does not answer {_me(environment)} as a job's rank 0 would"
        raise LaunchError(f"{text}: set MASTER_PORT to a free port, the same for all ranks") from error


def _check_job(store: dist.Store, environment: Environment, point: Rendezvous) -> None:
    """The first thing that a rank does, so that one of another job leaves before it counts as one of this one's."""
    if environment.rank == 0:
        store.set("job", json.dumps({"job": point.job, "host": socket.gethostname(), "ranks": environment.world_size}))
        return
    try:
        theirs = json.loads(store.get("job"))
    except dist.DistStoreError as error:
        raise LaunchError(f"{_me(environment)} waits at {_at(point)}, but rank 0 has not come") from error
    if (theirs["job"], theirs["ranks"]) != (point.job, environment.world_size):
        mine = f"{_me(environment)} is of {point.job or 'a nameless job'} ({environment.world_size} ranks)"
        other = f"{theirs['job'] or 'a nameless job'} ({theirs['ranks']} ranks)"
        rule = "give each job a MASTER_PORT of its own, and all ranks of a job the same --out"
        raise LaunchError(f"{mine}, but rank 0 on {theirs['host']}, at {_at(point)}, of {other}: {rule}")


def _come(store: dist.Store, environment: Environment, point: Rendezvous) -> None:
    if store.add(f"times/{environment.rank}", 1) > 1:
        text = f"{_me(environment)} is the second rank {environment.rank} that came to {_at(point)}"
        raise LaunchError(f"{text}: is the same run started twice?")
    store.set(f"came/{environment.rank}", socket.gethostname())


def _wait_for_all(store: dist.Store, environment: Environment, point: Rendezvous, patience: timedelta) -> None:
    ranks = range(environment.world_size)
    try:
        store.wait([f"came/{rank}" for rank in ranks], patience)
    except dist.DistStoreError as error:
        came = [rank for rank in ranks if store.check([f"came/{rank}"])]
        hosts = [f"{rank} on {store.get(f'came/{rank}').decode()}" for rank in came[:_MOST_NAMED]]
        missing = [str(rank) for rank in ranks if rank not in came]
        seconds = f"within {patience.total_seconds():g} s (timeout.join)"
        counts = f"{len(came)} of {len(ranks)} ranks came to {_at(point)} {seconds}: rank {_listed(hosts, came)}"
        raise LaunchError(f"{counts}; missing: rank {_listed(missing[:_MOST_NAMED], missing)}") from error


def _listed(named: list[str], every: list[str] | list[int]) -> str:
    return ", ".join(named) + (", ..." if len(every) > len(named) else "")
