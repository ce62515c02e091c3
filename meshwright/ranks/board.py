"""A board: notes that ranks leave for one rank from background threads, independent of all collectives.

Collectives belong to the step's thread: neither a process group nor MPI may be used from a second thread.

| transport        | a note is               | who collects notes                                                     |
|------------------|-------------------------|------------------------------------------------------------------------|
| torch            | a key of the job's store | sleeps in one request, which the store answers when the last has come |
| MPI, one process | a file in a folder      | looks for each rank's, in rank order                                   |

A store's client is a socket behind a lock, so a board opens its own client. Each note is collected once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

_MOST_PAUSE_SECONDS = 0.25
"""Seconds between two looks at a folder, which a thousand ranks may poll."""


class Board(Protocol):
    """Notes by name. Raises OSError if a note cannot be written, or does not come within `seconds`."""

    def post(self, name: str, text: str) -> None: ...

    def collect(self, names: Sequence[str], seconds: float) -> list[str]: ...


@dataclass(frozen=True)
class StoreBoard:
    """Notes in the job's store, through a client that nobody else uses."""

    store: dist.Store

    def post(self, name: str, text: str) -> None:
        try:
            self.store.set(name, text)
        except dist.DistError as error:
            raise ConnectionError(f"{name}: the job's store, on rank 0's host, is gone") from error

    def collect(self, names: Sequence[str], seconds: float) -> list[str]:
        names = list(names)
        try:
            # One request that the store answers when the last note has come: a thousand ranks that asked in turn would
            # load it.
            self.store.wait(names, timedelta(seconds=seconds))
            texts = [note.decode() for note in self.store.multi_get(names)]
            for name in names:
                self.store.delete_key(name)
        except dist.DistNetworkError as error:
            raise ConnectionError("the job's store, on rank 0's host, is gone") from error
        except dist.DistStoreError as error:
            missing = next(name for name in names if not self.store.check([name]))
            raise TimeoutError(f"{missing} was never finished") from error
        return texts


@dataclass(frozen=True)
class FolderBoard:
    """Notes as files in a folder that all ranks see."""

    folder: Path

    def post(self, name: str, text: str) -> None:
        path = self.folder / name
        draft = path.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        # A rename is one step: nobody reads half a note.
        draft.rename(path)

    def collect(self, names: Sequence[str], seconds: float) -> list[str]:
        texts, deadline = [], time.monotonic() + seconds
        for name in names:
            path = self.folder / name
            await_path(path, deadline - time.monotonic())
            texts.append(path.read_text(encoding="utf-8"))
            path.unlink()
        return texts


def await_path(path: Path, seconds: float) -> None:
    """Return when another rank has made `path`. Raises TimeoutError after `seconds`, or if its folder is gone."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not path.exists():
        if time.monotonic() > deadline or not path.parent.exists():
            raise TimeoutError(f"{path} was never finished")
        time.sleep(pause)
        # Short pauses first, since the note usually comes at once; longer ones while a slow disk is waited for.
        pause = min(2 * pause, _MOST_PAUSE_SECONDS)
