"""Planned job, reduced to one rank: meta tensors, a ledger, messages that arrive at once.

The planner runs one rank of a layout this way: sent bytes are exact, and an observer is called with every collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.comm import DONE, Comm, PieceSizes, RankGroup, Sent, SoloComm, Work, size_bytes
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import FROM_HOST, HOST, MESSAGE, TO_HOST
from meshwright.ranks.mailbox import Mailbox, Message, MessageMeta, Side, both_sides, neighbours_of
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.transport import Transport

Observer = Callable[[str, str, int, int | None], Work]
"""A function observer(axes, verb, payload_bytes, root), called with every collective that a planned rank begins.

`payload_bytes`: the whole payload. `root`: the root of a rooted verb; for a send the receiver's distance in the group.
The returned Work's wait is called when the rank would wait."""


def unobserved(axes: str, verb: str, payload_bytes: int, root: int | None) -> Work:
    """Record nothing."""
    return DONE


class LedgerComm(SoloComm):
    """A planned group of any size. Tensors are on the meta device, so nothing is sent; every verb is reported to the
    ledger and the observer."""

    def __init__(self, group: RankGroup, observer: Observer = unobserved) -> None:
        super().__init__(group)
        self._observer = observer

    def _collective(
        self, verb: str, payload_bytes: int, start: Callable[[], Work], wait: bool, root: int | None = None
    ) -> Work:
        # Records in the ledger as in a run; calls the observer in place of the transport.
        return super()._collective(verb, payload_bytes, lambda: self._begun(verb, payload_bytes, root), wait, root)

    def _begun(self, verb: str, payload_bytes: int, root: int | None) -> Work:
        return self._observer(self.axis, verb, payload_bytes, root) if self.size > 1 else DONE

    def all_to_all(self, out: Tensor, x: Tensor, *, pieces: PieceSizes | None = None, wait: bool = True) -> Work:
        """Report the larger of sent and received bytes: with imbalance a rank may receive more rows than it sends."""
        payload = max(size_bytes(out), size_bytes(x))
        return self._collective("all_to_all", payload, lambda: DONE, wait)

    def _message(self, sent: Sent, received: Sent) -> Work:
        works = [self._begun("send", size_bytes(x), (to - self.index) % self.size) for x, to in sent]
        return works[0] if works else DONE


class PlannedMailbox(Mailbox):
    """A mailbox of meta tensors: all activations arrive at once, sends only write the ledger.

    In a training step each activation sent is answered by a gradient. A side with a positive count of messages answers;
    an evaluation expects no gradients, so the count there is 0.
    """

    device = "meta"

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group.axis)
        self.ledger = group.ledger
        self._places, self._index = neighbours_of(group), group.index
        self._meta = both_sides()
        self._answers: dict[Side, bool] = {}
        self._come: list[Message] = []

    def open(self, epoch: int, meta: MessageMeta, before: int, after: int) -> None:
        self._meta = meta
        counts: dict[Side, int] = {"before": before, "after": after}
        self._answers = {side: count > 0 for side, count in counts.items()}
        self._come = [
            self._message(side, index, subject)
            for side, subjects in meta.items()
            for subject, forms in subjects.items()
            if forms.inward
            # `counts` are sums over all subjects, each with one message a microbatch.
            for index in range(counts[side] // len(subjects))
        ]

    def _message(self, side: Side, index: int, subject: int) -> Message:
        forms = self._meta[side][subject].tensors
        tensors = (torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in forms)
        return Message(side, index, tuple(tensors), subject)

    def send(self, to: Side, index: int, tensors: Sequence[Tensor], subject: int = 0) -> None:
        size = sum(size_bytes(x) for x in tensors)
        self.ledger.record(self.axis, MESSAGE, size, self._places[to] - self._index)
        # Each activation sent is answered by a gradient, except in an evaluation.
        if self._answers[to] and not self._meta[to][subject].inward:
            self._come.append(self._message(to, index, subject))

    def poll(self) -> list[Message]:
        come, self._come = self._come, []
        return come

    def wait(self) -> list[Message]:
        assert self._come, f"axis {self.axis}: no message to wait for"
        return self.poll()


@dataclass(frozen=True)
class LedgerTransport(Transport):
    """The transport of a planned job, reduced to this rank: sends are only recorded in the ledger."""

    observer: Observer = unobserved

    def comm(self, group: RankGroup) -> Comm:
        return LedgerComm(group, self.observer)

    def host_copy(self, payload_bytes: int, *, to_host: bool) -> Work:
        return self.observer(HOST, TO_HOST if to_host else FROM_HOST, payload_bytes, None)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        return PlannedMailbox(group) if len(group.ranks) > 1 else Mailbox(group.axis)


@dataclass(frozen=True)
class PlannedMesh(Mesh):
    """A rank's mesh in a job that does not run. Tensors are meta tensors, comms only write the ledger."""

    stands_for: str = "cpu"
    """The type of device that the job is planned for."""
    imbalance: float = 1.0
    """Rows that this rank's experts receive, over the rows of an even router."""
    whole_logits: bool = False
    """True if the program holds all logits of a microbatch at once."""
    of_capability: tuple[int, int] | None = None
    """The compute capability of the GPU that the job is planned for."""
    make_experts: Callable[..., Any] | None = None
    """A function (mesh, shape, boundary, products) that makes a layer's experts as another program has them."""

    @property
    def device_type(self) -> str:
        """Return the type of device that the job is planned for."""
        return self.stands_for

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability of the GPU that the job is planned for; None on a CPU."""
        return self.of_capability


def planned_mesh(
    grid: Grid, rank: int, token_axes: tuple[str, ...], stands_for: str = "cpu", observer: Observer = unobserved,
    imbalance: float = 1.0, *, whole_logits: bool = False, capability: tuple[int, int] | None = None,
    make_experts: Callable[..., Any] | None = None,
) -> PlannedMesh:  # fmt: skip
    """Make a planned rank's mesh. `observer`: called with every collective; other arguments: fields of PlannedMesh."""
    transport = LedgerTransport(observer)
    return PlannedMesh(
        grid, rank, torch.device("meta"), transport, token_axes, grid.world_size, stands_for=stands_for,
        imbalance=imbalance, whole_logits=whole_logits, of_capability=capability,
        make_experts=make_experts,
    )  # fmt: skip
