"""Transport: the maker of a rank's comms, mailboxes and board."""

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
    """The maker of comms over groups of ranks, mailboxes along axes, and a board for all ranks.

    Only the ranks of a group call the methods for that group. This class serves a single process, in which every group
    has one rank. TorchTransport (gloo, NCCL), MpiTransport and ThreadTransport connect ranks; LedgerTransport serves a
    planned job.
    """

    def comm(self, group: RankGroup) -> Comm:
        return SoloComm(group)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        return Mailbox(group.axis)

    def board(self, folder: Path) -> Board:
        """Make a board for background threads. `folder`: readable by all ranks, for transports without a store."""
        # MPI and a single process have no store, but always a folder that all ranks can read.
        return FolderBoard(folder)

    def host_copy(self, payload_bytes: int, *, to_host: bool) -> Work:
        """Announce a copy between device and host memory of this rank, so that a plan counts the copy.

        Args:
            payload_bytes: bytes of the copy.
            to_host: True from the device, False to the device.
        """
        return DONE

    def named_when_lost(self) -> AbstractContextManager[None]:
        """Make a context that turns the library's error on a broken connection into one that names the rank."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """Make a context in which this rank waits for a thread of its own and calls no verb.

        Other ranks of the process run meanwhile.
        """
        return nullcontext()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Poll `ready` with sleeps in between, for events from several sources."""
        while not ready():
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """Disconnect, without waiting for other ranks."""
