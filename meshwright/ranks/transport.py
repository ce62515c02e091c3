"""Transport: makes a rank's comms and mailboxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from meshwright.ranks.board import Board, FolderBoard
from meshwright.ranks.comm import DONE, NAP_SECONDS, Comm, RankGroup, SoloComm, Work
from meshwright.ranks.mailbox import Mailbox


class Transport:
    """Makes the comm over a group of ranks, the mailbox along an axis, a board for all ranks. Each is called by the
    group's ranks alone. This class is a single process's, whose groups all have one rank.

    TorchTransport (gloo, NCCL), MpiTransport and ThreadTransport connect ranks; LedgerTransport is a planned job's.
    """

    def comm(self, group: RankGroup) -> Comm:
        return SoloComm(group)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        return Mailbox(group.axis)

    def board(self, folder: Path) -> Board:
        """Notes between background threads. `folder`: one that all ranks see, for transports without a store."""
        # MPI and a single process have no store, but always a folder that all ranks see.
        return FolderBoard(folder)

    def host_copy(self, payload_bytes: int, *, to_host: bool) -> Work:
        """Announce a copy between this rank's device and its host's memory, which a plan counts.

        Args:
            payload_bytes: of the copy.
            to_host: True from the device, False to the device.
        """
        return DONE

    def named_when_lost(self) -> AbstractContextManager[None]:
        """A context in which the library's error on a broken connection becomes one that names the rank."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """A context in which this rank waits for its own thread and calls no verb: ranks of its process run
        meanwhile."""
        return nullcontext()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Poll `ready` with sleeps in between: for events that come by several ways."""
        while not ready():
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """Disconnect, without waiting for other ranks."""
