"""Transport over torch.distributed: verbs, process groups, and the start of a job. gloo on CPUs, NCCL on GPUs.

Under NCCL every group also has a gloo backend: host tensors are sent over gloo, device tensors over NCCL. Headers,
decisions, reports and barriers are host tensors, and wait for no device.

gloo sends through sockets, in threads that take a core from computing ranks. So ranks of one node with tensors on the
host share a window (window_comm.py). Several nodes, and ranks that may not share memory, use gloo's verbs.

NCCL creates a communicator at the first use, in a call on the host that waits for all members. Members that first use
two communicators in different orders would wait for ever. So one small sum creates a communicator together with its
group, in an order that all members share. Messages of two members are batches, which use the group's communicator
instead of one for the pair.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ranks import comm_store
from meshwright.ranks.agreement import all_texts
from meshwright.ranks.board import Board, StoreBoard
from meshwright.ranks.comm import DONE, Comm, Later, PieceSizes, Posted, RankGroup, RecordedComm, Sent, Work
from meshwright.ranks.environment import Environment, Rendezvous, carry_messages_first, use_interface
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.flight_recorder import CONNECT, Call, FlightRecorder
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import Mailbox, Side, neighbours_of
from meshwright.ranks.mailbox_torch import Channel, DeviceMailbox, GlooMailbox, NcclLinks
from meshwright.ranks.peers import LOOPBACK, Peers, interface_at
from meshwright.ranks.timeouts import Timeouts
from meshwright.ranks.transport import Transport
from meshwright.ranks.window import SharedWindow, open_window
from meshwright.ranks.window_comm import WindowComm

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

TORCH_MARGIN_SECONDS = 60.0
"""Seconds by which torch's timeouts exceed the watchdog's, since the watchdog's message says more."""


class TorchComm(RecordedComm):
    """A group's verbs over a process group of the same ranks in the same order.

    Verbs progress in gloo's threads, or in NCCL's stream.
    """

    def __init__(self, group: RankGroup, process_group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.process_group = process_group

    def _barrier(self, *, asleep: bool = False) -> Work:
        return DONE if asleep else dist.barrier(self.process_group, async_op=True)

    def _sum(self, x: Tensor, root: int | None) -> Work:
        if root is None:
            return dist.all_reduce(x, group=self.process_group, async_op=True)
        return dist.reduce(x, group_dst=root, group=self.process_group, async_op=True)

    def _reduce_scatter(self, shard: Tensor, x: Tensor) -> Work:
        if x.device.type == "cpu":
            return self._sum_own_piece(shard.view(-1), x.view(self.size, -1))
        return reduce_scatter_single(shard.view(-1), x.view(-1), group=self.process_group, async_op=True)

    def _collect(self, x: Tensor, shard: Tensor, root: int | None) -> Work:
        if root is None:
            return all_gather_single(x.view(-1), shard.view(-1), group=self.process_group, async_op=True)
        parts = list(x.view(-1).chunk(self.size)) if self.index == root else None
        return dist.gather(shard.view(-1), parts, group_dst=root, group=self.process_group, async_op=True)

    def _sum_own_piece(self, shard: Tensor, pieces: Tensor) -> Work:
        """Reduce-scatter `pieces` [n, k]: send piece j to rank j, and sum the received pieces in a fixed order.

        gloo's own reduce-scatter is an all-reduce on a copy: twice the bytes, and 2 to 3 times the seconds of this one
        at 2 and 4 ranks.
        """
        received = pieces.new_empty(self.size - 1, shard.numel())
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        sources = [(self.index - step) % self.size for step in range(1, self.size)]
        work = self._message([(pieces[to], to) for to in others], list(zip(received, sources, strict=True)))

        def finish() -> None:
            work.wait()
            if shard.data_ptr() != pieces[self.index].data_ptr():
                shard.copy_(pieces[self.index])
            # Own piece first, then by distance: a fixed order, independent of arrival.
            for piece in received:
                shard.add_(piece)

        return Later(finish)

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return dist.all_to_all_single(out.view(-1), x.view(-1), group=self.process_group, async_op=True)

    def _trade(self, out: Tensor, x: Tensor, pieces: PieceSizes) -> Posted:
        flat, sizes = (out.view(-1), x.view(-1)), (list(pieces.received), list(pieces.sent))
        posted: Posted = dist.all_to_all_single(*flat, *sizes, group=self.process_group, async_op=True)
        return posted

    def _broadcast(self, x: Tensor, root: int) -> Work:
        return dist.broadcast(x, group_src=root, group=self.process_group, async_op=True)

    def _scatter(self, shard: Tensor, x: Tensor, root: int) -> Work:
        parts = list(x.view(-1).chunk(self.size)) if self.index == root else None
        return dist.scatter(shard.view(-1), parts, group_src=root, group=self.process_group, async_op=True)

    def _message(self, sent: Sent, received: Sent) -> Work:
        # A batch goes over the group's communicator; a single isend under NCCL would make one for the pair.
        ends = [(dist.isend, *end) for end in sent] + [(dist.irecv, *end) for end in received]
        works = dist.batch_isend_irecv([
            dist.P2POp(begin, x, group=self.process_group, group_peer=member) for begin, x, member in ends
        ])  # fmt: skip
        return Later(lambda: [work.wait() for work in works])


class TorchWindowComm(WindowComm, TorchComm):
    """A comm of ranks of one node: a window for collectives, gloo for messages between two ranks."""

    def __init__(self, group: RankGroup, process_group: dist.ProcessGroup, window: SharedWindow) -> None:
        TorchComm.__init__(self, group, process_group)
        self._use(window)
        self._under_way = TorchComm(group, process_group)
        self._under_way._numbers = self._numbers  # one count for all calls of an axis

    def under_way(self) -> TorchComm:
        return self._under_way


@dataclass(frozen=True)
class TorchTransport(Transport):
    """The groups of a process that has joined the job's process group. `timeout`: torch's own, for every group.

    `device`: device of the sent tensors. `births`: True to create NCCL communicators together with groups.
    """

    timeout: timedelta
    device: torch.device
    births: bool
    peers: Peers

    def comm(self, group: RankGroup) -> Comm:
        if len(group.ranks) == 1:
            return super().comm(group)
        if len(group.ranks) == dist.get_world_size():
            assert dist.group.WORLD is not None, "the default process group is not initialised"
            return self._comm(group, self.born(dist.group.WORLD))
        return self._comm(group, self._process_group(group.axis, group.ranks, group.index))

    def _comm(self, group: RankGroup, process_group: dist.ProcessGroup) -> TorchComm:
        """Make a comm over a window if tensors are on the host and the ranks share a node; else over gloo or NCCL."""
        if self.births:
            return TorchComm(group, process_group)
        # Texts sent to open a window are no part of training, and not recorded in the ledger.
        uncounted = TorchComm(replace(group, ledger=Ledger(), recorder=FlightRecorder()), process_group)
        try:
            window = open_window(group, lambda text: all_texts(text, uncounted))
        except LaunchError:  # on every member
            window = None
        return TorchComm(group, process_group) if window is None else TorchWindowComm(group, process_group, window)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        if len(group.ranks) == 1:
            return super().mailbox(group, device)
        channels = self._channels(group)
        if device.type == "cuda":
            return DeviceMailbox(group, channels, device, NcclLinks(channels, device))
        return GlooMailbox(group, channels)

    def _channels(self, group: RankGroup) -> dict[Side, Channel]:
        """Open the channels to the neighbours: the rank before first, so that ranks do not wait in a circle.

        In a ring the first and the last rank open their common channel last.
        """
        channels: dict[Side, Channel] = {}
        places = neighbours_of(group)
        for side in sorted(places, key=lambda side: (side == "before") == (places[side] > group.index)):
            neighbour = places[side]
            pair = tuple(group.ranks[at] for at in sorted((group.index, neighbour)))
            mine = int(group.index > neighbour)
            forward = self._process_group(f"{group.axis} forward", pair, mine)
            backward = self._process_group(f"{group.axis} backward", pair, mine)
            # Both ends make the same two groups: one end's outgoing is the other's incoming.
            out, back = (forward, backward) if mine == 0 else (backward, forward)
            channels[side] = Channel(1 - mine, out, back)
        return channels

    def board(self, folder: Path) -> Board:
        c10d: Any = dist.distributed_c10d
        # A clone has a connection of its own: a long wait holds the lock of the store's client.
        return StoreBoard(c10d._get_default_store().clone())

    def born(self, process_group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Create the group's communicator by a first collective of all members; return the group."""
        if self.births:
            dist.all_reduce(torch.zeros(1, device=self.device), group=process_group)
        return process_group

    def _process_group(self, name: str, ranks: tuple[int, ...], index: int) -> dist.ProcessGroup:
        """Make a process group with a call of the members alone, since stages may need different groups.

        `dist.new_group(use_local_synchronization=True)` names a group by the calling rank's number of groups. Ranks
        with different earlier groups would wait under different names.

        Args:
            name: part of the group's key in the store, with the ranks.
            ranks: the members, in order.
            index: this rank's index among the members.
        """
        c10d: Any = dist.distributed_c10d
        backend, store = dist.Backend(dist.get_backend()), c10d._get_default_store()
        met_as = f"{name}:{'-'.join(map(str, ranks))}"
        group, _ = c10d._new_process_group_helper(
            len(ranks), index, list(ranks), backend, store, met_as, timeout=self.timeout
        )
        # torch looks up `group_peer` and `group_dst` here; new_group would have filled this in.
        c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
        assert isinstance(group, dist.ProcessGroup), f"rank {ranks[index]} is not in its own group {met_as}"
        return self.born(group)

    def named_when_lost(self) -> AbstractContextManager[None]:
        return self.peers.named_when_lost()

    def close(self) -> None:
        dist.destroy_process_group()


def open_torch(
    environment: Environment, device: torch.device, point: Rendezvous, recorder: FlightRecorder, timeout: Timeouts
) -> TorchTransport:
    """Join the job's store at `point`, and the job's process group.

    Raises:
        LaunchError: names ranks that did not join.
        LostRankError: names a rank that joined and cannot be reached.
    """
    # Longer than the watchdog's timeout: the watchdog names the missing rank, torch's own message a healthy one.
    patience = timedelta(seconds=timeout.wait + TORCH_MARGIN_SECONDS)
    store, peers = comm_store.join_job(environment, point, timeout.join, device.type)
    # Ranks of one host connect over loopback, so that no other host can connect.
    if interface := interface_at(peers.address or LOOPBACK):
        # Before the process group exists, since gloo and NCCL read the interface when they connect.
        use_interface(interface, local=not peers.address)
    if device.type == "cuda":
        carry_messages_first()
    with recorder.waiting(Call("world", CONNECT, 0, tuple(range(environment.world_size)))), peers.named_when_lost():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=patience,
        )  # no device_id: with one, NCCL makes groups by splitting the world, which needs every rank
    return TorchTransport(patience, device, births=device.type == "cuda", peers=peers)
