"""A job's store listens only at the address that the job's ranks need."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.ranks.listening import address_to_listen, listener_at, listening_store

PATIENCE = timedelta(seconds=20)


def test_a_store_listens_on_loopback_alone() -> None:
    store = listening_store("127.0.0.1", 0, PATIENCE)
    store.set("a", "b")
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", store.port))  # another address of this host; TCPStore itself would answer there
    client = dist.TCPStore("127.0.0.1", store.port, timeout=PATIENCE, wait_for_workers=False)
    assert client.get("a") == b"b"


def test_a_port_that_is_taken_is_an_error_of_the_system() -> None:
    with listener_at("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listening_store("127.0.0.1", first.getsockname()[1], PATIENCE)


@pytest.mark.parametrize(
    "address, listens",
    [
        ("127.0.0.1", ""),  # a name that is loopback on this host alone: other hosts find another address
        ("192.0.2.77", ""),  # an address of a NAT or a service
    ],
)
def test_an_address_that_is_no_interfaces(address: str, listens: str) -> None:
    assert address_to_listen(address) == listens
