"""Links between ranks: timings of every verb of a Comm and of a mailbox's messages, under the conditions of a job.

| verb                                                    | payload, bytes of                |
|---------------------------------------------------------|----------------------------------|
| all_reduce, broadcast, reduce                           | the tensor                       |
| reduce_scatter, all_gather, all_to_all, gather, scatter | the parts of all members         |
| send                                                    | the tensor sent to the next rank |
| message                                                 | the message to a neighbour       |

Rooted verbs use another root in each call, so that no call begins before the previous one has ended. Payloads take
turns, so that none is in a cache, as in a run. With more ranks than cores the times include waiting for a core.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from meshwright.planner.calibrate.timing import Effort, Points, lower_quartile, wait_for_device
from meshwright.ranks.comm import Comm
from meshwright.ranks.grid import PIPE
from meshwright.ranks.launch import StopRequest
from meshwright.ranks.machine import usable_cores
from meshwright.ranks.mailbox import Mailbox, Side, TensorMeta, both_sides
from meshwright.ranks.mesh import Mesh

ROUNDS = 5
MOST_CALLS = 1000
_ELEMENT_BYTES = 4
WORK_SECONDS = 5e-3
MEETING_BYTES = 2**20
"""Approximate work between two collectives of tensor parallelism, and the bytes of each collective."""
_MOST_PAYLOADS = 512
"""Largest number of payloads that take turns. Small payloads need no more: the time is latency, cached or not."""
TURNS_ROUNDS = 10
"""Time budget for oversubscription, in points. The sharing of cores varies from call to call."""

TimedCall = Callable[[int], object]
"""Makes the i-th call of a series."""


@dataclass(frozen=True)
class Conversation:
    """Timer of calls that all ranks make together. The first rank decides the number of calls: 0 to stop."""

    comm: Comm
    device: torch.device
    point_seconds: float
    stop: StopRequest

    def seconds(self, call: TimedCall) -> float:
        """Return the seconds of a call in an undisturbed round, measured on this rank."""

        def one_round(calls: int) -> float:
            self.comm.barrier()  # else the wait for a late rank would be timed
            wait_for_device(self.device)
            start = time.perf_counter()
            for index in range(calls):
                call(index)
            wait_for_device(self.device)
            return (time.perf_counter() - start) / calls

        return self.undisturbed(one_round)

    def undisturbed(self, one_round: Callable[[int], float]) -> float:
        """Return the seconds of a call in an undisturbed round. `one_round(n)` makes n calls and returns the seconds
        of one."""
        one_round(2)  # connections, buffers
        # All ranks must make the same number of calls, else they hang: the first rank decides by its own clock. Zero
        # calls mean a request to stop, so that all ranks stop at the same place.
        wanted = max(1, min(MOST_CALLS, math.ceil(self.point_seconds / ROUNDS / one_round(2))))
        calls = torch.tensor([0 if self.stop.requested else wanted])
        self.comm.broadcast(calls, root=0)
        if not calls.item():
            sys.exit()
        return lower_quartile([one_round(int(calls.item())) for _ in range(ROUNDS)])


def measure_links(effort: Effort, mesh: Mesh, stop: StopRequest) -> dict[str, Points]:
    """Measure points (bytes of the payload, seconds) of each verb among all ranks, which form the pipe axis."""
    conversation = Conversation(mesh.comm(PIPE), mesh.device, effort.point_seconds, stop)
    points: dict[str, Points] = {}
    for wanted in effort.payloads:
        for verb, payload, call in _verbs(conversation.comm, mesh.device, wanted, effort.cold_bytes):
            points.setdefault(verb, []).append((payload, conversation.seconds(call)))
    exchange = Exchange(mesh.mailbox(PIPE), mesh.index(PIPE), mesh.size(PIPE))
    points["message"] = []
    for payload in effort.payloads:
        count = payloads_in_turn(payload, effort.cold_bytes)
        xs = list(torch.zeros(count, payload, dtype=torch.uint8, device=mesh.device))
        both_ways = conversation.undisturbed(partial(exchange.there_and_back, conversation, xs))
        points["message"].append((payload, both_ways / 2))
    return points


def measure_overlap(effort: Effort, mesh: Mesh, stop: StopRequest) -> float:
    """Measure the hidden share of an all-reduce of `overlap_bytes`, during matrix products of twice the duration."""
    comm = mesh.comm(PIPE)
    conversation = Conversation(comm, mesh.device, effort.point_seconds * ROUNDS, stop)
    x = torch.zeros(effort.overlap_bytes // _ELEMENT_BYTES, device=mesh.device)
    a, b = (torch.randn(effort.dtype_side, effort.dtype_side, device=mesh.device) for _ in range(2))
    alone = conversation.seconds(lambda _: comm.all_reduce(x))
    product = conversation.seconds(lambda _: torch.matmul(a, b))
    # Twice the all-reduce's time, so that all of it could be hidden. Ranks wait for each other: equal numbers on all.
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
    # Sequential seconds minus overlapped seconds.
    hidden = alone + work_seconds - conversation.seconds(beside)
    return min(1.0, max(0.0, hidden / alone))


def measure_turns(effort: Effort, mesh: Mesh, stop: StopRequest) -> float:
    """Measure oversubscription on CPUs: the slow-down of a rank's work if all ranks work and synchronise.

    The ratio of two times: the time of the work with all ranks, which sum MEETING_BYTES after every WORK_SECONDS of
    work; and the processor time of the same work if only one rank per core works. Ranks that share cores and often wait
    for each other lose more than the share of a core: 2.3 instead of 2 for 4 ranks on 2 cores. Cores are shared
    unevenly, all ranks wait for the last, and caches are full of another rank's data.
    """
    comm = mesh.comm(PIPE)
    conversation = Conversation(comm, mesh.device, TURNS_ROUNDS * effort.point_seconds, stop)
    x = torch.zeros(MEETING_BYTES // _ELEMENT_BYTES)
    side = effort.dtype_side
    count = math.ceil(effort.cold_bytes / (3 * _ELEMENT_BYTES * side**2))
    # Operands that together exceed the caches take turns, like a run's weights.
    factors = cycle([(torch.randn(side, side), torch.randn(side, side), torch.zeros(side, side)) for _ in range(count)])

    def work(products: int) -> float:
        """Compute some products; return the processor time of one."""
        start = time.process_time()
        for _ in range(products):
            a, b, product = next(factors)
            torch.matmul(a, b, out=product)
        return (time.process_time() - start) / products

    wanted = torch.tensor([math.ceil(WORK_SECONDS / work(count))])
    comm.broadcast(wanted, root=0)
    products = int(wanted.item())

    def work_and_meet(_: int) -> None:
        work(products)
        comm.all_reduce(x)

    comm.barrier()
    rank_seconds = 1.0  # only the first ranks, one a core, time themselves; no result of another rank is read
    if mesh.index(PIPE) < usable_cores():
        rank_seconds = lower_quartile([work(products) for _ in range(TURNS_ROUNDS)])
    comm.barrier()
    # The all-reduce's own time is no part of the work.
    meeting = conversation.seconds(lambda _: comm.all_reduce(x))
    return max(1.0, (conversation.seconds(work_and_meet) - meeting) / (products * rank_seconds))


def _verbs(
    comm: Comm, device: torch.device, wanted_bytes: int, cold_bytes: int
) -> Iterator[tuple[str, int, TimedCall]]:
    """Yield (verb, bytes of the payload, call) for all verbs. Payloads have equal parts per rank and are not cached."""
    size, index = comm.size, comm.index
    elements = max(1, wanted_bytes // _ELEMENT_BYTES // size)
    payload = size * elements * _ELEMENT_BYTES
    pool = torch.zeros(2, payloads_in_turn(payload, cold_bytes), size, elements, device=device)
    wholes, others = (list(half) for half in pool)
    parts, aparts = [whole[index] for whole in wholes], [buffer[index] for buffer in others]
    after, before = (index + 1) % size, (index - 1) % size
    verbs: dict[str, Callable[[int, int], object]] = {
        "all_reduce": lambda at, _: comm.all_reduce(wholes[at]),
        "reduce_scatter": lambda at, _: comm.reduce_scatter(parts[at], wholes[at]),
        "all_gather": lambda at, _: comm.all_gather(wholes[at], parts[at]),
        "all_to_all": lambda at, _: comm.all_to_all(others[at], wholes[at]),
        "broadcast": lambda at, root: comm.broadcast(wholes[at], root),
        "reduce": lambda at, root: comm.reduce(wholes[at], root),
        "gather": lambda at, root: comm.gather(wholes[at], aparts[at], root),
        "scatter": lambda at, root: comm.scatter(aparts[at], wholes[at], root),
        "send": lambda at, _: comm.exchange(wholes[at], after, others[at], before),
    }
    for verb, call in verbs.items():
        yield verb, payload, lambda turn, call=call: call(turn % len(wholes), turn % size)  # type: ignore[misc]


def payloads_in_turn(payload: int, cold_bytes: int) -> int:
    """Return the number of payloads that take turns, each twice in memory, to exceed the caches.

    In a run a payload was computed some time before it is sent, so caches have other data.
    """
    return max(1, min(_MOST_PAYLOADS, cold_bytes // (2 * payload)))


class Exchange:
    """Messages back and forth between neighbours: ranks 0 and 1, 2 and 3, ...; the last of an odd number has none."""

    def __init__(self, mailbox: Mailbox, index: int, size: int) -> None:
        self.mailbox = mailbox
        self.side: Side = "before" if index % 2 else "after"
        self.paired = index % 2 == 1 or index < size - 1
        self.epoch = 0

    def there_and_back(self, conversation: Conversation, xs: Sequence[Tensor], calls: int) -> float:
        """Return the seconds of a message with answer, averaged over `calls`. The payloads `xs` take turns."""
        expected = calls if self.paired else 0
        # Posted before timing, as a pipeline posts a step's receives.
        counts = {"before": 0, "after": 0} | {self.side: expected}
        self.mailbox.open(self.epoch, both_sides(TensorMeta(tuple(xs[0].shape), xs[0].dtype)), **counts)
        self.epoch += 1
        conversation.comm.barrier()
        start = time.perf_counter()
        for index in range(expected):
            if self.side == "after":
                self.mailbox.send("after", index, (xs[index % len(xs)],))
                self.mailbox.wait()
            else:
                self.mailbox.wait()
                self.mailbox.send("before", index, (xs[index % len(xs)],))
        self.mailbox.flush()
        wait_for_device(conversation.device)
        return (time.perf_counter() - start) / calls
