"""Transport: what makes a rank's comms and mailboxes; and the one of a rank that is alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from meshwright.ranks.board import Board, FolderBoard
from meshwright.ranks.comm import NAP_SECONDS, Comm, RankGroup, SoloComm
from meshwright.ranks.mailbox import Mailbox, SoloMailbox


class Transport(ABC):
    """Makes the comm over a group of ranks, the mailbox along an axis, a board for all ranks. Called by the group's
    ranks and nobody else.

    TorchTransport (gloo, NCCL), MpiTransport, ThreadTransport, SoloTransport, and LedgerTransport of a planned job.
    """

    @abstractmethod
    def comm(self, group: RankGroup) -> Comm: ...

    @abstractmethod
    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox: ...

    def board(self, folder: Path) -> Board:
        """Notes between ranks' threads. `folder`: one that all ranks see, where notes lie that have no other place."""
        # MPI and a single process have no store, and a folder that all see they have in any case.
        return FolderBoard(folder)

    def named_when_lost(self) -> AbstractContextManager[None]:
        """While entered, an error of the library on a broken connection becomes one that names the rank."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """While entered, this rank waits for a thread of its own, and calls no verb: ranks of one process run
        meanwhile."""
        return nullcontext()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Look again and again, asleep between two looks, until `ready`: for what comes by several ways."""
        while not ready():
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """Leave the other ranks behind, without waiting for any."""
        return


class SoloTransport(Transport):
    """One process, no library: every group has one rank."""

    def comm(self, group: RankGroup) -> Comm:
        return SoloComm(group)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        return SoloMailbox(group.axis)
