"""NCCL's rule of birth, on gloo: a hang on GPUs is an error here within seconds, and names the waiting ranks.

A communicator is born at the first use by all members, and the host waits for the birth. A collective and a batch of
messages use the group's communicator; a message outside a batch uses a communicator of two ranks. Inside `births`,
every first use of a communicator waits in the job's store for all members.

A rehearsed mesh makes groups as on GPUs, with the host as the device. Headers are sent over gloo, as on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import irecv, isend

from meshwright.ranks import torch_comm
from meshwright.ranks.comm import RankGroup, Work
from meshwright.ranks.mailbox import Mailbox, Side
from meshwright.ranks.mailbox_torch import Channel, DeviceMailbox, GlooMailbox
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.torch_comm import TorchComm, TorchTransport

PATIENCE_SECONDS = 30.0
"""Seconds until a birth has failed: a busy machine is no mistake."""
SHORT_SECONDS = 3.0
"""Seconds until a birth has failed that must fail."""

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all_single", "barrier",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single",
)  # fmt: skip
MESSAGES = {"send": "group_dst", "isend": "group_dst", "recv": "group_src", "irecv": "group_src"}
"""The verbs between two ranks, and the argument that names the other rank."""


_HEADER = 1
"""The tag of messages that would be sent over gloo: a rehearsed group has a single half."""


class NotBorn(Exception):
    """Ranks that would wait for each other forever."""


@dataclass
class Births:
    """The communicators of this rank, and the waits for births."""

    rank: int
    store: dist.Store
    patience: float
    known: set[str] = field(default_factory=set)

    def use(self, verb: str, name: str, ranks: Sequence[int]) -> None:
        """Return when all members have reached the communicator's birth; at once if the communicator is born."""
        if name in self.known:
            return
        self.store.set(f"waits/{self.rank}", f"rank {self.rank} waits in {verb} for the birth of {name}")
        self.store.set(f"birth/{name}/{self.rank}", "")
        deadline = time.monotonic() + self.patience
        while not self.store.check([f"birth/{name}/{rank}" for rank in ranks]):
            if time.monotonic() > deadline:
                self.store.set("failure", "; ".join(self._waits()))
                self.explain()
            time.sleep(0.002)
        self.store.set(f"waits/{self.rank}", "")
        self.known.add(name)

    def explain(self) -> None:
        """Raise the finding of a rank, if there is one: all other ranks see only a broken connection."""
        if self.store.check(["failure"]):
            raise NotBorn(self.store.get("failure").decode())

    def _waits(self) -> Iterator[str]:
        for rank in range(dist.get_world_size()):
            if self.store.check([f"waits/{rank}"]) and (text := self.store.get(f"waits/{rank}").decode()):
                yield text

    def collective(self, verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            group = options.get("group") or next((x for x in arguments if isinstance(x, dist.ProcessGroup)), None)
            self.use(verb, *_named(group))
            return run(*arguments, **options)

        return watched

    def message(self, verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(x: Tensor, **options: Any) -> Any:
            name, ranks = _named(options["group"])
            pair = sorted((self.rank, ranks[options[MESSAGES[verb]]]))
            self.use(verb, f"{name}'s pair {pair[0]}-{pair[1]}", pair)
            return run(x, **options)

        return watched

    def batch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(messages: Sequence[dist.P2POp]) -> Any:
            self.use("batch_isend_irecv", *_named(messages[0].group))
            return run(messages)

        return watched


def _named(group: dist.ProcessGroup | None) -> tuple[str, list[int]]:
    group = group or dist.group.WORLD
    assert group is not None
    return group.group_name, dist.get_process_group_ranks(group)


@contextmanager
def births(mesh: Mesh, name: str = "", *, with_groups: bool = True, batched: bool = True) -> Iterator[Mesh]:
    """Yield the mesh as on GPUs. While entered, torch's verbs obey NCCL's rule.

    `with_groups`: communicators are born when groups of axes are made. `batched`: messages use the group's
    communicator. Both are as in Meshwright. Without both, the verbs are as before 0.7, when pipelines, 2-D layouts and
    tied embeddings hung. `name`: the prefix of groups that a mesh makes again.
    """
    c10d: Any = dist.distributed_c10d
    patience = PATIENCE_SECONDS if with_groups and batched else SHORT_SECONDS
    rule = Births(mesh.rank, dist.PrefixStore(f"births {name}", c10d._get_default_store()), patience)
    original = {verb: getattr(dist, verb) for verb in (*COLLECTIVES, *MESSAGES, "P2POp") if hasattr(dist, verb)}

    def message_of(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        verb = "isend" if operation is dist.isend else "irecv"
        return original["P2POp"](original[verb], *arguments, **options)

    with ExitStack() as stack:
        for verb in COLLECTIVES:
            for module in (dist, torch_comm):
                if hasattr(module, verb):
                    stack.enter_context(patch.object(module, verb, rule.collective(verb, getattr(module, verb))))
        for verb in MESSAGES:
            stack.enter_context(patch.object(dist, verb, rule.message(verb, original[verb])))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", rule.batch(dist.batch_isend_irecv)))
        stack.enter_context(patch.object(dist, "P2POp", message_of))
        assert isinstance(mesh.transport, TorchTransport)
        transport = Rehearsed(
            mesh.transport.timeout,
            mesh.device,
            births=with_groups,
            peers=mesh.transport.peers,
            batched=batched,
            name=name,
        )
        rehearsed = replace(mesh, transport=transport, _comms={}, _mailboxes={})
        try:
            yield rehearsed
        except Exception:
            rule.explain()
            raise
        for mailbox in rehearsed._mailboxes.values():
            mailbox.shut()


@dataclass(frozen=True)
class Rehearsed(TorchTransport):
    """Groups as on GPUs, on hosts."""

    batched: bool = True
    name: str = ""

    def _process_group(self, name: str, ranks: tuple[int, ...], index: int) -> dist.ProcessGroup:
        return super()._process_group(self.name + name, ranks, index)

    def _comm(self, group: RankGroup, process_group: dist.ProcessGroup) -> TorchComm:
        """GPUs have no window."""
        return TorchComm(group, process_group)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        if len(group.ranks) == 1:
            return Mailbox(group.axis)
        channels = replace(self, births=True)._channels(group)
        if not self.batched:
            return GlooMailbox(group, channels)
        on_host = {side: HostChannel(way.peer, way.outgoing, way.incoming) for side, way in channels.items()}
        return DeviceMailbox(group, on_host, device, HostLinks(channels))


class HostChannel(Channel):
    """The gloo half of a way, which has no communicators."""

    def send(self, buffer: Tensor) -> Work:
        work = isend(buffer, group=self.outgoing, group_dst=self.peer, tag=_HEADER)
        assert work is not None
        return work

    def receive(self, buffer: Tensor) -> Work:
        work = irecv(buffer, group=self.incoming, group_src=self.peer, tag=_HEADER)
        assert work is not None
        return work


@dataclass(frozen=True)
class Ended:
    """The end of a transfer. `thread`: the thread that waits for the end."""

    thread: Thread | None = None

    def query(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


@dataclass(frozen=True)
class HostLinks:
    """A device that has done all work at once."""

    channels: dict[Side, Channel]

    def mark(self) -> Ended:
        return Ended()

    def send(self, to: Side, buffer: Tensor) -> Ended:
        return _ended(self.channels[to].send(buffer, batched=True))

    def receive(self, side: Side, new_buffer: Callable[[], Tensor]) -> tuple[Ended, Tensor]:
        buffer = new_buffer()
        return _ended(self.channels[side].receive(buffer, batched=True)), buffer


def _ended(work: Work) -> Ended:
    """Return the end of a transfer by a waiting thread: gloo reports no end without a wait."""
    thread = Thread(target=work.wait, daemon=True)
    thread.start()
    return Ended(thread)
