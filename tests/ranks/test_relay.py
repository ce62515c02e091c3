"""A store that is reached over a network: by who knows the job's secret, and by nobody else."""

from __future__ import annotations

import os
import socket
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.environment import SECRET
from meshwright.errors import LaunchError
from meshwright.ranks import relay
from meshwright.ranks.listening import known_secret, listener_at, listening_store, new_secret
from tests.patience import PATIENCE_SECONDS

HERE, PATIENCE = "127.0.0.1", timedelta(seconds=PATIENCE_SECONDS)
OURS, THEIRS = b"0123456789abcdef", b"fedcba9876543210"


@pytest.fixture
def guarded() -> tuple[dist.TCPStore, int]:
    """A store, and the port of its gate."""
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
    assert clients[1].clone().get("count") == b"2"  # a board's own connection


def test_a_stranger_reads_and_writes_nothing(guarded: tuple[dist.TCPStore, int]) -> None:
    store, port = guarded
    store.set("leader", "ours")
    with socket.create_connection((HERE, port), PATIENCE_SECONDS) as stranger:
        assert not relay.knows_us(stranger, THEIRS)
    for words in (b"", b"\x00" * 4, b"GET / HTTP/1.0\r\n\r\n" + b" " * 64, OURS + OURS):
        with socket.create_connection((HERE, port), PATIENCE_SECONDS) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            heard = b""
            while part := stranger.recv(2**16):
                heard += part
            assert heard.startswith(relay.GREETING)
            assert len(heard) == len(relay.GREETING) + 32
    # A number that was answered once is another one the next time.
    with socket.create_connection((HERE, port), PATIENCE_SECONDS) as ours:
        assert relay.knows_us(ours, OURS)
    assert store.get("leader") == b"ours"


def test_what_is_no_gate_is_told_apart() -> None:
    with listener_at(HERE, 0) as other, socket.create_connection(other.getsockname(), PATIENCE_SECONDS) as connection:
        answering, _ = other.accept()
        with answering:
            answering.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + b"x" * 64)
            with pytest.raises(relay.NoGateError):
                relay.knows_us(connection, OURS)


def test_a_relay_ends_with_the_process_that_started_it() -> None:
    with listener_at(HERE, 0) as kept:
        port = kept.getsockname()[1]
        if not (child := os.fork()):
            relay.start("gate", kept, HERE, 1, OURS)
            with socket.create_connection((HERE, port), PATIENCE_SECONDS) as way:
                way.recv(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(100):  # this process has closed the socket as well: nobody listens once the relay is gone
        try:
            socket.create_connection((HERE, port), PATIENCE_SECONDS).close()
        except ConnectionError:
            return
        time.sleep(0.1)
    pytest.fail("the relay listens still")


def test_a_jobs_own_secret_is_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(FileNotFoundError):
        known_secret(tmp_path / "status")
    first = new_secret(tmp_path / "status")
    assert known_secret(tmp_path / "status") == first
    assert stat.S_IMODE((tmp_path / "status" / "store.secret").stat().st_mode) == 0o600
    assert new_secret(tmp_path / "status") != first  # each start of rank 0 has another
    assert (new_secret(None), known_secret(None)) == (b"", None)
    monkeypatch.setenv(SECRET, OURS.decode())
    assert new_secret(None) == known_secret(tmp_path) == OURS
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(LaunchError, match="16 or more"):
        new_secret(None)
