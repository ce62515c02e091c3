"""Mailbox over MPI (mpi4py), on host memory: Irecv posted ahead, Isend, and a Test of the oldest of each.

An MPI library makes progress only inside its calls, so each poll also moves what is under way. While it waits the rank
naps between two tests, where MPI would spin and take the core from a rank that computes (comm_mpi.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import NAP_SECONDS
from meshwright.comm_mpi import raw
from meshwright.flight_recorder import FlightRecorder
from meshwright.ledger import Ledger
from meshwright.mailbox import AHEAD, FURTHER, Arrival, PackedMailbox, Side


class MpiMailbox(PackedMailbox):
    """`comm` is an mpi4py communicator of the axis's own, of its ranks in order."""

    def __init__(
        self,
        axis: str,
        neighbours: Mapping[Side, int],
        ledger: Ledger,
        recorder: FlightRecorder,
        comm: Any,
        ahead: int = AHEAD["cpu"],
    ) -> None:
        super().__init__(axis, neighbours, ledger, recorder, torch.device("cpu"), ahead)
        self.comm = comm
        self._receives: dict[Side, deque[tuple[Any, Tensor]]] = {side: deque() for side in neighbours}
        self._sends: dict[Side, deque[tuple[Any, Tensor]]] = {side: deque() for side in neighbours}

    def _post(self, side: Side, buffer: Tensor) -> None:
        self._receives[side].append((self.comm.Irecv(raw(buffer), source=self.comm.rank + FURTHER[side]), buffer))

    def _dispatch(self, to: Side, buffer: Tensor) -> None:
        self._drop_sent()
        self._sends[to].append((self.comm.Isend(raw(buffer), dest=self.comm.rank + FURTHER[to]), buffer))

    def _drop_sent(self) -> None:
        for sends in self._sends.values():
            while sends and sends[0][0].Test():
                sends.popleft()

    def _arrived(self) -> list[Arrival]:
        self._drop_sent()
        arrivals = []
        for side, receives in self._receives.items():
            while receives and receives[0][0].Test():
                arrivals.append(Arrival.on_host(side, receives.popleft()[1]))
        return arrivals

    def _flush(self) -> None:
        self._drop_sent()
        while any(self._sends.values()):
            time.sleep(NAP_SECONDS)
            self._drop_sent()

    def shut(self) -> None:
        for receives in self._receives.values():
            for request, _ in receives:
                request.Cancel()
                request.Free()
        self.comm.Free()
