"""gloo's listening address, and the ranks that a broken connection has lost."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from meshwright.ranks.environment import carry_messages_first, fuse_multiply_adds, use_interface
from meshwright.ranks.errors import LostRankError
from meshwright.ranks.peers import Peer, Peers, interface_at

FIRST, BESIDE, SECOND, THIRD = (
    Peer(0, "node0"),  # opened the store
    Peer(1, "node0", "127.0.0.1", "127.0.1.1"),  # on the same host; Debian maps the host's name to 127.0.1.1
    Peer(2, "node1", "10.77.0.2", "10.77.0.1"),
    Peer(3, "node1", "10.77.0.2", "10.77.0.1"),
)
JOB = [FIRST, BESIDE, SECOND, THIRD]


def test_every_rank_takes_the_address_at_which_others_have_reached_its_host() -> None:
    assert [Peers(JOB, me).address for me in range(4)] == ["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.2"]


def test_ranks_of_one_host_leave_gloo_alone() -> None:
    assert Peers([FIRST, BESIDE], 1).address == ""


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_at("127.0.0.1") == "lo"
    assert interface_at("192.0.2.1") is None
    assert interface_at("2001:db8::1") is None


def test_the_users_interface_stays() -> None:
    variables = {"GLOO_SOCKET_IFNAME": "ib0"}
    use_interface("eth0", local=False, variables=variables)
    assert variables == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_nccl_gets_the_interface_of_a_job_on_one_host() -> None:
    variables: dict[str, str] = {}
    use_interface("lo", local=True, variables=variables)
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


BROKEN = "[/gloo/transport/tcp/pair.cc:537] Read error [{}]:61105: Connection reset by peer. This is typically caused"


@pytest.mark.parametrize(
    "me, address, who",
    [
        (0, "10.77.0.2", "rank 2 on node1 or rank 3 on node1"),
        (2, "10.77.0.1", "rank 0 on node0 or rank 1 on node0"),
        (2, "10.77.0.2", "rank 3 on node1"),
        (0, "10.77.0.9", "a rank at 10.77.0.9"),
    ],
)
def test_a_lost_rank_is_named(me: int, address: str, who: str) -> None:
    with pytest.raises(LostRankError, match=rf"^lost {who} \({address}: connection reset by peer\); the message of"):
        with Peers(JOB, me).named_when_lost():
            raise RuntimeError(BROKEN.format(address))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shape mismatch$"), Peers(JOB, 0).named_when_lost():
        raise RuntimeError("shape mismatch")


def test_a_peer_travels_as_json() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as way:
        peer = Peer.connected(5, way)
    assert (peer.address, peer.reached, peer.far) == ("127.0.0.1", "127.0.0.1", False)
    assert Peer.from_json(peer.to_json()) == peer


@pytest.mark.parametrize(
    "choose, name",
    [(carry_messages_first, "TORCH_NCCL_HIGH_PRIORITY"), (fuse_multiply_adds, "TRITON_DEFAULT_FP_FUSION")],
)
def test_libraries_are_told_unless_the_user_has_chosen(choose: Callable[[dict[str, str]], None], name: str) -> None:
    unsaid: dict[str, str] = {}
    said = {name: "0"}
    for variables in (unsaid, said):
        choose(variables)
    assert (unsaid, said) == ({name: "1"}, {name: "0"})
