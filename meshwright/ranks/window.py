"""A window: memory that the ranks of one node share, and a meeting of those ranks that costs one sleep.

Each member makes memory without a name (memfd) and opens the others' through /proc. So nothing can stay behind in
/dev/shm, however a rank ends, and a container's small /dev/shm (Docker's has 64 MB) is no limit: pages that were never
written take no memory, all others count as the rank's that wrote them.

    semaphores, one for each member | slot 0 | slot 1

A member writes into its own slot, meets the others, and reads theirs. The next collective takes the other slot: whoever
has come to that one's meeting has read the first, so that two slots take the place of a second meeting.

A meeting is a semaphore from each member to each: the kernel wakes who waits, where MPI spins and takes the core from a
rank that still computes. Before it sleeps a rank lets the others have its core (sched_yield) for some microseconds and
looks again: ranks that come about together need no wake. A rank that sleeps lets its library make progress between
whiles, and looks whether those it waits for live.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.comm import RankGroup
from meshwright.ranks.errors import LaunchError, LostRankError
from meshwright.ranks.hang import process_state

SLOT_BYTES = 4 * 2**20
"""Bytes of a slot; larger payloads go in pieces."""
_SEMAPHORE_BYTES = 64
"""A cache line per semaphore; glibc's take 32 bytes."""
_PAGE = mmap.PAGESIZE

_YIELD_SECONDS = 5e-5
"""How long a rank yields its core before it sleeps."""
_NAP_SECONDS = 5e-4
"""Seconds of a rank's sleep between its library's chances to progress, which a sent message may need."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks that the awaited ranks live."""

ExchangeTexts = Callable[[str], list[str]]
"""A collective: every member's text, in member order."""


class _Time(ctypes.Structure):
    """C's struct timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    for name in ("sem_post", "sem_trywait"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time)]
    return library


class SharedWindow:
    """`memory`: every member's, in order, as bytes; `processes`: process ids. `progress`: called between sleeps, for a
    library without threads of its own. Made by all members together."""

    def __init__(
        self,
        group: RankGroup,
        memory: Sequence[Tensor],
        processes: Sequence[int],
        exchange: ExchangeTexts,
        progress: Callable[[], object] | None,
    ) -> None:
        self.index, self.size, self._ranks = group.index, len(group.ranks), group.ranks
        self._processes, self._exchange, self._progress = processes, exchange, progress
        self._libc, self._memory = _libc(), memory  # which keeps the addresses below alive
        own, me = memory[self.index].data_ptr(), self.index
        others = [(me + step) % self.size for step in range(1, self.size)]
        self._to = [memory[other].data_ptr() + me * _SEMAPHORE_BYTES for other in others]
        self._from = [(own + other * _SEMAPHORE_BYTES, other) for other in others]
        for semaphore, _ in self._from:
            # 1: shared between processes. Each member makes those that it waits on.
            self._libc.sem_init(semaphore, 1, 0)
        exchange("")  # from here on others may post them
        start = _slots_start(self.size)
        self._slots = [
            [part[start + turn * SLOT_BYTES : start + (turn + 1) * SLOT_BYTES] for part in memory] for turn in (0, 1)
        ]
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._turn = 0
        places = [
            part.data_ptr() + member * _SEMAPHORE_BYTES for member, part in enumerate(memory)
        ]  # nobody's semaphore
        self._calls = [[ctypes.c_int64.from_address(place + 8 * turn) for place in places] for turn in (0, 1)]
        self._num_meetings = 0

    def share(self, num_bytes: int) -> list[Tensor]:
        """Zeroed memory of every member that all members can read. Collective."""
        shared = _share(num_bytes, self._ranks, self._exchange)
        # None here only if a rank has no memory left: the window exists, so the members share a node.
        if shared is None:
            text = f"a rank on {socket.gethostname()} gets no {num_bytes / 1e6:.0f} MB of memory that ranks share"
            raise LaunchError(f"{text}: raise its limits of memory and open files, or hold less (docs/memory.md)")
        return shared[0]

    def slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Every member's slot of the next collective, viewed as `dtype`."""
        if dtype not in self._views:
            self._views[dtype] = [[slot.view(dtype) for slot in slots] for slots in self._slots]
        self._turn = 1 - self._turn
        return self._views[dtype][self._turn]

    def meet(self, call: int = 0) -> None:
        """Return when every member has come here; what they wrote before can then be read. Raises LostRankError where
        one of them is gone.

        `call`: says what this member is doing. Where another does something else nobody returns, as in any library's
        collective: the watchdog names both calls.
        """
        # Two places in turn, as with slots: a fast member may be in the next meeting while others still read this call.
        calls = self._calls[self._num_meetings % 2]
        self._num_meetings += 1
        calls[self.index].value = call
        # Post all before waiting for any, so that the order of members costs nothing.
        for semaphore in self._to:
            self._libc.sem_post(semaphore)
        for semaphore, member in self._from:
            if self._libc.sem_trywait(semaphore):
                self._wait(semaphore, member)
        while any(other.value != call for other in calls):
            time.sleep(_LOOK_SECONDS)

    def _wait(self, semaphore: int, member: int) -> None:
        until = time.monotonic() + _YIELD_SECONDS
        while time.monotonic() < until:
            os.sched_yield()
            if not self._libc.sem_trywait(semaphore):
                return
        look = time.monotonic() + _LOOK_SECONDS
        nap = _LOOK_SECONDS if self._progress is None else _NAP_SECONDS
        while True:
            # By the monotonic clock: a wall clock set back would keep a rank asleep.
            end = _Time(*divmod(time.monotonic_ns() + int(nap * 1e9), 10**9))
            if not self._libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(end)):
                return
            if self._progress is not None:
                self._progress()
            if time.monotonic() >= look:
                # A process that has ended posts nothing, and one that nobody has waited for is still listed (Z, X).
                if process_state(self._processes[member]) in ("", "Z", "X"):
                    who = f"rank {self._ranks[member]} on {socket.gethostname()}"
                    raise LostRankError(
                        f"lost {who}: its process is gone; the message of the rank that left first has the cause"
                    )
                look = time.monotonic() + _LOOK_SECONDS


def _slots_start(size: int) -> int:
    return -(-size * _SEMAPHORE_BYTES // _PAGE) * _PAGE


def open_window(
    group: RankGroup, exchange: ExchangeTexts, progress: Callable[[], object] | None = None
) -> SharedWindow | None:
    """The group's window, which its members open together; None where they are on several nodes, where one gets no
    such memory, or where there is no Linux with glibc 2.30 or newer.

    Raises LaunchError on every member where one is refused such memory.
    """
    shared = _share(_slots_start(len(group.ranks)) + 2 * SLOT_BYTES, group.ranks, exchange)
    return None if shared is None else SharedWindow(group, *shared, exchange, progress)


def _share(size: int, ranks: Sequence[int], exchange: ExchangeTexts) -> tuple[list[Tensor], list[int]] | None:
    """`size` bytes of every rank's memory, and the ranks' process ids; None on several nodes, or where one has none."""
    # memfd is Linux's; semaphores that wait by the monotonic clock came with glibc 2.30.
    possible = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "sem_clockwait")
    own, node = _own_memory(size) if possible else (-1, "")
    try:
        # Asked even if impossible here, since the other members wait for this rank's answer.
        notes = [json.loads(text) for text in exchange(json.dumps([node, os.getpid(), own]))]
        if not node or any(other != node for other, _, _ in notes):
            return None
        processes = [process for _, process, _ in notes]
        memory, problem = _opened([(process, file) for _, process, file in notes], size)
        for rank, text in zip(ranks, exchange(problem), strict=True):
            if text:
                rule = "the ranks of a node sum in memory that they share; let them, or set layout.transport=torch"
                raise LaunchError(f"rank {rank} on {socket.gethostname()} is refused another rank's {text}: {rule}")
    finally:
        if own >= 0:
            os.close(own)  # the mappings live on
    return memory, processes


def _own_memory(size: int) -> tuple[int, str]:
    """An anonymous file (memfd) and its node's identity; (-1, empty) if there is no such memory."""
    try:
        own = os.memfd_create("meshwright")
    except OSError:
        return -1, ""
    os.ftruncate(own, size)
    # Processes that can open each other's memory share the boot, the host name and the PID namespace.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return own, f"{boot} {socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"


def _opened(places: Sequence[tuple[int, int]], size: int) -> tuple[list[Tensor], str]:
    """The memory of each (process, file), and the refusal's text, if any."""
    memory: list[Tensor] = []
    for process, number in places:
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            return memory, f"memory (process {process}, {error.strerror})"
        memory.append(torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8))
        os.close(file)
    return memory, ""
