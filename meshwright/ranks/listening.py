"""A job's store at one address of this host, and the store's secret. TCPStore alone listens at all addresses.

| ranks                        | the store listens at                                        | asks for a secret |
|------------------------------|-------------------------------------------------------------|-------------------|
| of one host                  | loopback                                                    | no                |
| of several, MASTER_ADDR ours | that address alone                                          | yes (relay.py)    |
| of several, else             | all addresses: a NAT's or a service's address is no host's  | yes               |

The secret is MESHWRIGHT_SECRET, or a new one written by rank 0 into the run's folder, readable by the user alone. A
job of several hosts without both (`nodes`, `verify`) has no secret.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import closing
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from meshwright.ranks.environment import job_secret
from meshwright.ranks.foreign import read_text, write_fresh
from meshwright.ranks.relay import NO_FILE

_FILE = "store-{}.secret"
_BACKLOG = 2048
"""Connections that wait to be accepted: a thousand ranks may connect in the same moment."""


def listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Open a store that listens at `address` alone; an empty address stands for all.

    Raises:
        OSError: The address is not this host's, or the port is taken.
        RuntimeError: torch cannot open the store.
    """
    with closing(listener_at(address, port)) as listener:
        port = listener.getsockname()[1]
        # The store owns the descriptor that it is given, and closes it.
        return dist.TCPStore(
            address or "127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip


def listener_at(address: str, port: int) -> socket.socket:
    """Open a socket that listens at a host's name or address and a port; port 0: a free one."""
    family, _, _, _, socket_address = socket.getaddrinfo(
        address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port of a run that has just ended is still held by its last connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def address_to_listen(address: str) -> str:
    """Return the address at which rank 0 listens for other hosts; empty for all of this host's.

    Args:
        address: MASTER_ADDR, at which other ranks connect.
    """
    found = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    # Debian writes `127.0.1.1 HOST` into a host's own /etc/hosts: other hosts find the name at another address.
    if ip_address(found.partition("%")[0]).is_loopback:
        return ""
    try:
        listener_at(address, 0).close()
    except OSError:
        return ""
    return address


def new_secret(shared: Path | None) -> tuple[bytes, str]:
    """Return the secret of a new job and the name of its file: the user's secret without a file, else a random one.

    Args:
        shared: A folder on a file system of all ranks. Without a folder the secret is empty.
    """
    if user_secret := job_secret():
        return user_secret.encode(), NO_FILE
    if shared is None:
        return b"", NO_FILE
    # A new name each time: a network's file system may remember a file's old content for seconds.
    secret, name = secrets.token_hex(16), secrets.token_hex(len(NO_FILE) // 2)
    shared.mkdir(parents=True, exist_ok=True)
    for old in shared.glob(_FILE.format("*")):
        old.unlink(missing_ok=True)
    write_fresh(shared / _FILE.format(name), secret, 0o600)
    return secret.encode(), name


def has_secret(shared: Path | None) -> bool:
    """Return whether a job's rank 0, started as this process, has a secret."""
    return shared is not None or bool(job_secret())


def known_secret(shared: Path | None, name: str) -> bytes:
    """Return the secret of the job's rank 0, by the name of its file in the gate's greeting.

    Raises:
        OSError: The folder has no such file.
    """
    if user_secret := job_secret():
        return user_secret.encode()
    return b"" if shared is None else read_text(shared / _FILE.format(name)).encode()
