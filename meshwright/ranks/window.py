"""Window: memory shared by the ranks of one node, and a barrier (a meeting) in which a rank sleeps at most once.

Each member makes anonymous memory (memfd) and opens the other members' memory through /proc. So a rank can leave no
file in /dev/shm, however the rank ends, and a container's small /dev/shm (Docker's: 64 MB) is no limit. Pages that were
never written take no memory; other pages count as memory of the rank that wrote them. The layout of each member's
memory:

    semaphores, one for each member | slot 0 | slot 1

A member writes to its own slot, meets the others, and reads all slots. The next collective uses the other slot. A
member in that collective's meeting has finished reading the first slot, so two slots save a second meeting.

In a meeting each member posts one semaphore of every other member. The kernel wakes waiting ranks; MPI would spin and
take the core from a rank that still computes. Before sleeping, a rank yields the core (sched_yield) for some
microseconds and tries again: ranks that arrive at nearly the same time need no sleep. A sleeping rank wakes now and
then, to let its library progress and to check that the awaited ranks live.
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
"""Bytes of a slot; larger payloads are sent in pieces."""
_SEMAPHORE_BYTES = 64
"""A cache line per semaphore; glibc's take 32 bytes."""
_PAGE = mmap.PAGESIZE

_YIELD_SECONDS = 5e-5
"""Seconds for which a rank yields the core before sleeping."""
_NAP_SECONDS = 5e-4
"""Seconds of sleep between two calls of `progress`, which a sent message may need."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks that the awaited ranks live."""

ExchangeTexts = Callable[[str], list[str]]
"""A collective that returns every member's text, in member order."""


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
    """The shared memory and meetings of a group, made by all members together.

    `memory`: every member's bytes, in member order. `processes`: the members' process ids. `progress`: called between
    sleeps, for a library without threads of its own.
    """

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
        self._libc, self._memory = _libc(), memory  # keeps the addresses below valid
        local_address, me = memory[self.index].data_ptr(), self.index
        others = [(me + step) % self.size for step in range(1, self.size)]
        self._to = [memory[peer].data_ptr() + me * _SEMAPHORE_BYTES for peer in others]
        self._from = [(local_address + peer * _SEMAPHORE_BYTES, peer) for peer in others]
        for semaphore, _ in self._from:
            # 1: shared between processes. Each member makes the semaphores on which it waits.
            self._libc.sem_init(semaphore, 1, 0)
        exchange("")  # others may post the semaphores from here on
        start = _slots_start(self.size)
        self._slots = [
            [buffer[start + turn * SLOT_BYTES : start + (turn + 1) * SLOT_BYTES] for buffer in memory]
            for turn in (0, 1)
        ]
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}
        self._turn = 0
        addresses = [
            buffer.data_ptr() + member * _SEMAPHORE_BYTES for member, buffer in enumerate(memory)
        ]  # unused as a semaphore: member to itself
        self._calls = [[ctypes.c_int64.from_address(address + 8 * turn) for address in addresses] for turn in (0, 1)]
        self._num_meetings = 0

    def share(self, num_bytes: int) -> list[Tensor]:
        """Allocate zeroed memory on every member, readable by all members. Collective."""
        shared = _share(num_bytes, self._ranks, self._exchange)
        # None only if a rank has no memory left: the window exists, so the members share a node.
        if shared is None:
            text = f"a rank on {socket.gethostname()} gets no {num_bytes / 1e6:.0f} MB of memory that ranks share"
            raise LaunchError(f"{text}: raise its limits of memory and open files, or hold less (docs/memory.md)")
        return shared[0]

    def slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Switch to the next collective's slots; return every member's slot as a view of `dtype`."""
        if dtype not in self._views:
            self._views[dtype] = [[slot.view(dtype) for slot in slots] for slots in self._slots]
        self._turn = 1 - self._turn
        return self._views[dtype][self._turn]

    def meet(self, call: int = 0) -> None:
        """Return after every member has called `meet`; earlier writes of all members can then be read.

        Raises LostRankError if a member's process has ended. `call`: number of this member's verb. If members' numbers
        differ, no member returns, as in any library's collective, and the watchdog names both calls.
        """
        # Two places in turn, as with slots: a fast member may be in the next meeting while others still read this call.
        calls = self._calls[self._num_meetings % 2]
        self._num_meetings += 1
        calls[self.index].value = call
        # Post all semaphores before the first wait, so that the order of members costs no time.
        for semaphore in self._to:
            self._libc.sem_post(semaphore)
        for semaphore, member in self._from:
            if self._libc.sem_trywait(semaphore):
                self._wait(semaphore, member)
        while any(peer_call.value != call for peer_call in calls):
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
            # By the monotonic clock: with a wall clock that is set back, a rank would sleep on.
            end = _Time(*divmod(time.monotonic_ns() + int(nap * 1e9), 10**9))
            if not self._libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(end)):
                return
            if self._progress is not None:
                self._progress()
            if time.monotonic() >= look:
                # An ended process posts nothing; the kernel lists one that was not reaped as Z or X.
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
    """Open the group's window. Collective.

    Returns None if the members are on several nodes, if a member gets no anonymous memory, or without Linux and glibc
    2.30 or newer. Raises LaunchError on every member if one is refused another's memory.
    """
    shared = _share(_slots_start(len(group.ranks)) + 2 * SLOT_BYTES, group.ranks, exchange)
    return None if shared is None else SharedWindow(group, *shared, exchange, progress)


def _share(size: int, ranks: Sequence[int], exchange: ExchangeTexts) -> tuple[list[Tensor], list[int]] | None:
    """Share `size` bytes of every rank; return each rank's memory and process id.

    Returns None if the ranks are on several nodes, or if a rank has no memory to share.
    """
    # memfd needs Linux; semaphores that wait by the monotonic clock need glibc 2.30.
    possible = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "sem_clockwait")
    descriptor, node = _own_memory(size) if possible else (-1, "")
    try:
        # Called even if impossible here, since the other members wait for this rank's text.
        notes = [json.loads(text) for text in exchange(json.dumps([node, os.getpid(), descriptor]))]
        if not node or any(peer_node != node for peer_node, _, _ in notes):
            return None
        processes = [process for _, process, _ in notes]
        memory, problem = _opened([(process, file) for _, process, file in notes], size)
        for rank, text in zip(ranks, exchange(problem), strict=True):
            if text:
                rule = "the ranks of a node sum in memory that they share; let them, or set layout.transport=torch"
                raise LaunchError(f"rank {rank} on {socket.gethostname()} is refused another rank's {text}: {rule}")
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the mappings stay valid
    return memory, processes


def _own_memory(size: int) -> tuple[int, str]:
    """Make an anonymous file (memfd); return its descriptor and the node's identity, (-1, empty) on failure."""
    try:
        descriptor = os.memfd_create("meshwright")
    except OSError:
        return -1, ""
    os.ftruncate(descriptor, size)
    # Processes that can open each other's memory share the boot, the host name and the PID namespace.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return descriptor, f"{boot} {socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"


def _opened(places: Sequence[tuple[int, int]], size: int) -> tuple[list[Tensor], str]:
    """Map the memory of each (process, file); return the memory, and the text of a refusal, else empty."""
    memory: list[Tensor] = []
    for process, descriptor in places:
        try:
            file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        except OSError as error:
            return memory, f"memory (process {process}, {error.strerror})"
        memory.append(torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8))
        os.close(file)
    return memory, ""
