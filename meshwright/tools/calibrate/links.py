"""The links between ranks: every verb of a Comm and a mailbox's messages, timed as a job's ranks meet them.

| verb                                                    | payload, bytes of                |
|---------------------------------------------------------|----------------------------------|
| all_reduce, broadcast, reduce                           | the tensor                       |
| reduce_scatter, all_gather, all_to_all, gather, scatter | all members' parts together      |
| send                                                    | the tensor sent to the next rank |
| message                                                 | the message to a neighbour       |

Rooted verbs take another root at each call, so that none begins before the last one has arrived. Where there are more
ranks than cores, the times have in them that ranks take turns.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from meshwright.launch import StopRequest
from meshwright.ranks.comm import Comm
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import Mailbox, Side, TensorMeta, both_sides
from meshwright.ranks.mesh import Mesh
from meshwright.tools.calibrate.timing import Effort, Points, lower_quartile, wait_for_device

ROUNDS = 5
MOST_CALLS = 1000
_ELEMENT_BYTES = 4
WORK_SECONDS = 5e-3
MEETING_BYTES = 2**20
"""About as much as a rank computes between two collectives of tensor parallelism, and as much as they sum."""
TURNS_ROUNDS = 10
"""How many points' time is spent on oversubscription: how cores are shared changes from call to call."""

TimedCall = Callable[[int], object]
"""The i-th call of a row of calls."""


@dataclass(frozen=True)
class Conversation:
    """Times calls that all ranks make together. The first rank says how many, and none where it is asked to stop."""

    comm: Comm
    device: torch.device
    point_seconds: float
    stop: StopRequest

    def seconds(self, call: TimedCall) -> float:
        """Seconds of a call in an undisturbed round, as this rank sees them."""
        return self.undisturbed(lambda calls: self._round(call, calls))

    def undisturbed(self, one_round: Callable[[int], float]) -> float:
        """Time `one_round` that makes so many calls by itself, and gives the seconds of one."""
        one_round(2)  # connections, buffers
        calls = self._agreed(one_round(2))
        return lower_quartile([one_round(calls) for _ in range(ROUNDS)])

    def _agreed(self, once: float) -> int:
        """The number of calls of about `once` seconds that make a round. Ends the rank where the job is to stop."""
        wanted = max(1, min(MOST_CALLS, math.ceil(self.point_seconds / ROUNDS / once)))
        calls = torch.tensor([0 if self.stop.requested else wanted])
        self.comm.broadcast(calls, root=0)
        if not calls.item():
            sys.exit()
        return int(calls.item())

    def _round(self, call: TimedCall, calls: int) -> float:
        self.comm.barrier()
        wait_for_device(self.device)
        start = time.perf_counter()
        for index in range(calls):
            call(index)
        wait_for_device(self.device)
        return (time.perf_counter() - start) / calls


def measure_links(effort: Effort, mesh: Mesh, stop: StopRequest) -> dict[str, Points]:
    """Points (bytes of the payload, seconds) of each verb among all ranks, which are those of the pipe axis."""
    conversation = Conversation(mesh.comm(PIPE), mesh.device, effort.point_seconds, stop)
    points: dict[str, Points] = {}
    for wanted in effort.payloads:
        for verb, payload, call in _verbs(conversation.comm, mesh.device, wanted):
            points.setdefault(verb, []).append((payload, conversation.seconds(call)))
    exchange = Exchange(mesh.mailbox(PIPE), mesh.index(PIPE), mesh.size(PIPE))
    points["message"] = [(payload, exchange.seconds(conversation, payload)) for payload in effort.payloads]
    return points


def measure_overlap(effort: Effort, mesh: Mesh, stop: StopRequest) -> float:
    """The part of a sum of `overlap_bytes` that goes on while this rank multiplies matrices for twice its time."""
    comm = mesh.comm(PIPE)
    conversation = Conversation(comm, mesh.device, effort.point_seconds * ROUNDS, stop)
    x = torch.zeros(effort.overlap_bytes // _ELEMENT_BYTES, device=mesh.device)
    a, b = (torch.randn(effort.dtype_side, effort.dtype_side, device=mesh.device) for _ in range(2))
    alone = conversation.seconds(lambda _: comm.all_reduce(x))
    product = conversation.seconds(lambda _: torch.matmul(a, b))
    count = torch.tensor([math.ceil(2 * alone / product)])
    comm.broadcast(count, root=0)

    def compute() -> None:
        for _ in range(int(count.item())):
            torch.matmul(a, b)

    def beside(_: int) -> None:
        work = comm.all_reduce(x, wait=False)
        compute()
        work.wait()

    work_seconds = conversation.seconds(lambda _: compute())
    hidden = alone + work_seconds - conversation.seconds(beside)
    return min(1.0, max(0.0, hidden / alone))


def measure_turns(effort: Effort, mesh: Mesh, stop: StopRequest) -> float:
    """Oversubscription: how many times as long a rank's work takes among all of them as its own processor time, where
    they sum MEETING_BYTES after every WORK_SECONDS of it. For CPUs.

    Ranks that share cores and meet often lose more than their share of a core (2.3 in place of 2 for 4 ranks on 2
    cores): cores are shared unevenly, and all wait for the last.
    """
    comm = mesh.comm(PIPE)
    conversation = Conversation(comm, mesh.device, TURNS_ROUNDS * effort.point_seconds, stop)
    x = torch.zeros(MEETING_BYTES // _ELEMENT_BYTES)
    a, b = (torch.randn(effort.dtype_side, effort.dtype_side) for _ in range(2))

    def processor_seconds(products: int) -> float:
        start = time.process_time()
        for _ in range(products):
            torch.matmul(a, b)
        return (time.process_time() - start) / products

    wanted = torch.tensor([math.ceil(WORK_SECONDS / processor_seconds(TURNS_ROUNDS))])
    comm.broadcast(wanted, root=0)
    products = int(wanted.item())

    def work_and_meet(_: int) -> None:
        for _ in range(products):
            torch.matmul(a, b)
        comm.all_reduce(x)

    own = lower_quartile([processor_seconds(products) for _ in range(TURNS_ROUNDS)])
    meeting = conversation.seconds(lambda _: comm.all_reduce(x))
    return max(1.0, (conversation.seconds(work_and_meet) - meeting) / (products * own))


def _verbs(comm: Comm, device: torch.device, wanted_bytes: int) -> Iterator[tuple[str, int, TimedCall]]:
    """(verb, bytes of its payload, a call) of all verbs; payloads are whole parts for every rank."""
    size, index = comm.size, comm.index
    whole = torch.zeros(size, max(1, wanted_bytes // _ELEMENT_BYTES // size), device=device)
    payload = whole.numel() * _ELEMENT_BYTES
    mine, other, apart = whole[index], torch.zeros_like(whole), torch.zeros_like(whole[0])
    after, before = (index + 1) % size, (index - 1) % size
    calls: dict[str, TimedCall] = {
        "all_reduce": lambda _: comm.all_reduce(whole),
        "reduce_scatter": lambda _: comm.reduce_scatter(mine, whole),
        "all_gather": lambda _: comm.all_gather(whole, mine),
        "all_to_all": lambda _: comm.all_to_all(other, whole),
        "broadcast": lambda call: comm.broadcast(whole, call % size),
        "reduce": lambda call: comm.reduce(whole, call % size),
        "gather": lambda call: comm.gather(whole, apart, call % size),
        "scatter": lambda call: comm.scatter(apart, whole, call % size),
        "send": lambda _: comm.exchange(whole, after, other, before),
    }
    for verb, call in calls.items():
        yield verb, payload, call


class Exchange:
    """Messages to and fro between neighbours: ranks 0 and 1, 2 and 3, ...; the last of an odd number has none."""

    def __init__(self, mailbox: Mailbox, index: int, size: int) -> None:
        self.mailbox = mailbox
        self.side: Side = "before" if index % 2 else "after"
        self.paired = index % 2 == 1 or index < size - 1
        self.epoch = 0

    def seconds(self, conversation: Conversation, payload: int) -> float:
        """Seconds of one way, in an undisturbed round."""
        return conversation.undisturbed(lambda calls: self._there_and_back(conversation, payload, calls)) / 2

    def _there_and_back(self, conversation: Conversation, payload: int, calls: int) -> float:
        x = torch.zeros(payload, dtype=torch.uint8, device=conversation.device)
        expected = calls if self.paired else 0
        counts = {"before": 0, "after": 0} | {self.side: expected}
        self.mailbox.open(self.epoch, both_sides(TensorMeta(tuple(x.shape), x.dtype)), **counts)
        self.epoch += 1
        conversation.comm.barrier()
        start = time.perf_counter()
        for index in range(expected):
            if self.side == "after":
                self.mailbox.send("after", index, (x,))
                self.mailbox.wait()
            else:
                self.mailbox.wait()
                self.mailbox.send("before", index, (x,))
        self.mailbox.flush()
        wait_for_device(conversation.device)
        return (time.perf_counter() - start) / calls
