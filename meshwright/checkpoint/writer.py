"""Writing a checkpoint while the run goes on: the step waits for the copy only.

Every rank writes its shard in a thread of its own; rank 0's waits for the others' and publishes the whole by a rename.
Ranks meet in the file system, not in a collective, so that nothing here can disturb the step's messages.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.manifest import Entry, Manifest, Progress, Shard, entry_of
from meshwright.checkpoint.reader import newest_step, steps_in
from meshwright.checkpoint.restore import Piece
from meshwright.errors import CheckpointError
from meshwright.mesh import Mesh

PARTIAL = ".partial-"
PATIENCE_SECONDS = 600.0
"""How long rank 0 waits for a rank's shard."""
DEFERENCE_SECONDS = 30.0
"""How long a rank keeps quiet about another's failure: the launcher ends it together with the rank that knows why."""


class _Abandoned(Exception):
    """Another rank could not write its part, and has removed the whole."""


class CheckpointWriter:
    """Writes step folders into `folder`, and keeps the newest `keep`. Made by all ranks together."""

    def __init__(self, folder: Path, mesh: Mesh, keep: int, config: dict[str, Any], tokenizer: str | None) -> None:
        self.folder = folder
        self.mesh = mesh
        self.keep = keep
        self.config = config
        self.tokenizer = tokenizer
        self.unfinished = self._clear() if mesh.rank == 0 else []
        """Checkpoints that an earlier run was killed in, now removed (known to rank 0)."""
        token = torch.tensor([time.time_ns() % 2**40], dtype=torch.int64, device=mesh.device)
        mesh.world.broadcast(token, 0)
        self._token = f"{PARTIAL}{int(token):x}"
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, progress: Progress, pieces: Iterable[Piece]) -> None:
        """Copy the pieces, then write them in the background. Waits for the checkpoint before, if it is still written.

        Raises CheckpointError where that one failed.
        """
        self.wait()
        copies = [(piece, piece.tensor.detach().to("cpu", copy=True).contiguous()) for piece in pieces]
        self._thread = threading.Thread(target=self._guarded_write, args=(progress, copies), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError where the last write failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            if isinstance(self._error, _Abandoned):
                time.sleep(DEFERENCE_SECONDS)
            newest = newest_step(self.folder)
            rest = f"the newest complete one is {newest}" if newest else "there is no complete one"
            failed = f"a checkpoint could not be written to {self.folder}: {self._error}"
            raise CheckpointError(f"{failed}; {rest}") from self._error

    def _clear(self) -> list[str]:
        unfinished = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.glob(f"{PARTIAL}*")):
                shutil.rmtree(path)
                unfinished.append(path.name)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written to {self.folder}: {error.strerror}") from error
        return unfinished

    def _guarded_write(self, progress: Progress, copies: list[tuple[Piece, Tensor]]) -> None:
        partial = self.folder / f"{self._token}-step-{progress.step}"
        try:
            if self.mesh.rank == 0:
                partial.mkdir()
            self._await(partial)
            self._write_shard(partial, copies)
            if self.mesh.rank == 0:
                self._publish(partial, progress)
        except Exception as error:  # whatever it is, the step that waits for this thread must hear of it
            abandoned = not partial.exists() and not self._step_folder(progress).exists()
            self._error = _Abandoned(f"another rank failed to write its part ({error})") if abandoned else error
            with suppress(OSError):
                self._remove(partial)  # half a checkpoint helps nobody, and the disk may be full

    def _remove(self, path: Path) -> None:
        """Remove a folder, by another name: it is there whole or not at all, also for ranks that still write to it."""
        shutil.rmtree(path.rename(self.folder / f"{self._token}-gone-{self.mesh.rank}"))

    def _step_folder(self, progress: Progress) -> Path:
        return self.folder / f"step-{progress.step}"

    def _write_shard(self, partial: Path, copies: list[tuple[Piece, Tensor]]) -> None:
        path = partial / f"rank-{self.mesh.rank}.safetensors"
        keys = [f"{piece.kind}/{piece.place.name}/{index}" for index, (piece, _) in enumerate(copies)]
        save_file({key: tensor for key, (_, tensor) in zip(keys, copies, strict=True)}, path)
        synced(path)
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        entries = [
            Entry(
                piece.place.name,
                piece.kind,
                piece.place.shape,
                piece.place.box.offsets,
                piece.place.box.lengths,
                str(tensor.dtype).removeprefix("torch."),
                path.name,
                key,
            )
            for key, (piece, tensor) in zip(keys, copies, strict=True)
        ]
        listing = {
            "shard": asdict(Shard(path.name, path.stat().st_size, digest)),
            "entries": [asdict(entry) for entry in entries],
        }
        draft = partial / f"rank-{self.mesh.rank}.draft"
        draft.write_text(json.dumps(listing))
        draft.rename(draft.with_suffix(".json"))

    def _publish(self, partial: Path, progress: Progress) -> None:
        listings = [self._listing(partial / f"rank-{rank}.json") for rank in range(self.mesh.grid.world_size)]
        shards = tuple(Shard(**listing["shard"]) for listing in listings)
        entries = tuple(entry_of(entry) for listing in listings for entry in listing["entries"])
        manifest = Manifest(progress, self.config["seed"], self.config, shards, entries)
        if self.tokenizer is not None:
            (partial / "tokenizer.json").write_text(self.tokenizer)
            synced(partial / "tokenizer.json")
        synced(manifest.write(partial))
        synced(partial)
        target = self._step_folder(progress)
        if target.exists():
            self._remove(target)
        partial.rename(target)
        synced(self.folder)
        for _, path in steps_in(self.folder)[: -self.keep]:
            self._remove(path)

    def _await(self, path: Path) -> None:
        """Return when another rank has made this file or folder."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline or not path.parent.exists():
                raise CheckpointError(f"{path} was never finished")
            time.sleep(0.005)

    def _listing(self, path: Path) -> dict[str, Any]:
        """What a rank says of its shard, as soon as it has said it."""
        self._await(path)
        listing: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return listing


def synced(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
