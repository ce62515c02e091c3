"""A store with a gate is reached over a network only with the job's secret."""

from __future__ import annotations

import os
import socket
import stat
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from meshwright.ranks import relay
from meshwright.ranks.environment import SECRET
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.listening import has_secret, known_secret, listener_at, listening_store, new_secret
from tests.patience import PATIENCE_SECONDS

HERE, PATIENCE = "127.0.0.1", timedelta(seconds=PATIENCE_SECONDS)
OURS, THEIRS = b"0123456789abcdef", b"fedcba9876543210"


@pytest.fixture
def guarded() -> tuple[dist.TCPStore, int]:
    """Return a store and the port of the store's gate."""
    store, gate = listening_store(HERE, 0, PATIENCE), listener_at(HERE, 0)
    port = gate.getsockname()[1]
    relay.start("gate", gate, HERE, store.port, OURS)
    return store, port


def client(port: int, secret: bytes) -> dist.TCPStore:
    near = listener_at(HERE, 0)
    own = near.getsockname()[1]
    relay.start("client", near, HERE, port, secret)
    return dist.TCPStore(HERE, own, timeout=PATIENCE, wait_for_workers=False)


def test_ranks_of_the_job_share_a_store(guarded: tuple[dist.TCPStore, int]) -> None:
    store, port = guarded
    clients = [client(port, OURS) for _ in range(3)]
    clients[0].set("large", "x" * 2**20)
    assert len(store.get("large")) == 2**20
    assert clients[1].add("count", 2) == 2
    store.set("late", "1")
    clients[2].wait(["late", "large"])
    assert cast(Any, clients[1]).clone().get("count") == b"2"  # a connection of a board


def test_a_stranger_reads_and_writes_nothing(guarded: tuple[dist.TCPStore, int]) -> None:
    store, port = guarded
    store.set("leader", "ours")
    with socket.create_connection((HERE, port), PATIENCE_SECONDS) as stranger:
        assert not relay.admitted(stranger, THEIRS, relay.greeted(stranger)[1])
    for words in (b"", b"\x00" * 4, b"GET / HTTP/1.0\r\n\r\n" + b" " * 64, OURS + OURS):
        with socket.create_connection((HERE, port), PATIENCE_SECONDS) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            heard = b""
            while part := stranger.recv(2**16):
                heard += part
            assert heard.startswith(relay.GREETING)
            assert len(heard) == len(relay.GREETING) + len(relay.NO_FILE) + 32
    # A gate's challenge differs at each connection, so an answered challenge opens no second connection.
    with socket.create_connection((HERE, port), PATIENCE_SECONDS) as ours:
        assert relay.admitted(ours, OURS, relay.greeted(ours)[1])
    assert store.get("leader") == b"ours"


def test_what_is_no_gate_is_told_apart() -> None:
    with listener_at(HERE, 0) as other, socket.create_connection(other.getsockname(), PATIENCE_SECONDS) as connection:
        answering, _ = other.accept()
        with answering:
            answering.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 64)
            with pytest.raises(relay.NoGateError):
                relay.greeted(connection)


def test_a_relay_ends_with_the_process_that_started_it() -> None:
    with listener_at(HERE, 0) as kept:
        port = kept.getsockname()[1]
        if not (child := os.fork()):
            relay.start("gate", kept, HERE, 1, OURS)
            with socket.create_connection((HERE, port), PATIENCE_SECONDS) as way:
                way.recv(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(100):  # this process has closed the socket as well, so no process listens after the relay's end
        try:
            socket.create_connection((HERE, port), PATIENCE_SECONDS).close()
        except ConnectionError:
            return
        time.sleep(0.1)
    pytest.fail("the relay listens still")


def test_a_jobs_own_secret_is_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    folder = tmp_path / "status"
    first, name = new_secret(folder)
    assert known_secret(folder, name) == first
    assert stat.S_IMODE((folder / f"store-{name}.secret").stat().st_mode) == 0o600
    second, other = new_secret(folder)  # each start of rank 0 makes another secret with another name
    assert (second != first, other != name) == (True, True)
    with pytest.raises(FileNotFoundError):
        known_secret(folder, name)
    assert (new_secret(None)[0], has_secret(None), has_secret(folder)) == (b"", False, True)
    monkeypatch.setenv(SECRET, OURS.decode())
    assert new_secret(None)[0] == known_secret(folder, relay.NO_FILE) == OURS
    assert has_secret(None)
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(LaunchError, match="16 or more"):
        new_secret(None)


def test_rank_0_hears_of_ranks_that_see_no_folder() -> None:
    gate = listener_at(HERE, 0)
    port = gate.getsockname()[1]
    told = relay.start("gate", gate, HERE, 1, OURS, "a" * 16)
    for who in ("rank 1 on node1", "rank 1 on node1", "rank 2 on a-host-of-a-name-that-is-long"):
        with socket.create_connection((HERE, port), PATIENCE_SECONDS) as way:
            assert relay.greeted(way)[0] == "a" * 16
            relay.tell_blind(way, who)
            assert way.recv(1) == b""
    assert os.read(told, 100).decode().splitlines() == ["rank 1 on node1", "rank 2 on a-host-of-a-name"]
