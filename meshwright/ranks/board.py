"""Board: notes from background threads of all ranks to one rank, independent of collectives.

Collectives belong to the step's thread: neither a process group nor MPI may be used from a second thread.

| transport        | a note is                | the collecting rank                                                |
|------------------|--------------------------|--------------------------------------------------------------------|
| torch            | a key of the job's store | sleeps in one request, answered by the store after the last note   |
| MPI, one process | a file in a folder       | polls for the note of each rank, in rank order                     |

A store's client is a socket behind a lock, so a board opens a client of its own. Each note is collected once.
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
"""Largest number of seconds between two polls of a folder, which a thousand ranks may poll."""


class Board(Protocol):
    """Notes by name. Raises OSError if a note cannot be written, or is missing after `seconds`."""

    def post(self, name: str, text: str) -> None: ...

    def collect(self, names: Sequence[str], seconds: float) -> list[str]: ...


@dataclass(frozen=True)
class StoreBoard:
    """Notes in the job's store, through a client for this board alone."""

    store: dist.Store

    def post(self, name: str, text: str) -> None:
        try:
            self.store.set(name, text)
        except dist.DistError as error:
            raise ConnectionError(f"{name}: the job's store, on rank 0's host, is gone") from error

    def collect(self, names: Sequence[str], seconds: float) -> list[str]:
        names = list(names)
        try:
            # One request, answered after the last note: repeated requests about a thousand ranks would load the store.
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
    """Notes as files in a folder that all ranks can read."""

    folder: Path

    def post(self, name: str, text: str) -> None:
        path = self.folder / name
        draft = path.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        # A rename is atomic, so that no rank reads half a note.
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
    """Return when another rank has made `path`. Raises TimeoutError after `seconds`, or if the folder is gone."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not path.exists():
        if time.monotonic() > deadline or not path.parent.exists():
            raise TimeoutError(f"{path} was never finished")
        time.sleep(pause)
        # Short pauses first, since the note is usually there soon; longer pauses for a slow disk.
        pause = min(2 * pause, _MOST_PAUSE_SECONDS)
