"""Writing of a checkpoint during training: a step waits only for the copy, and on a GPU for nothing (staging.py).

A thread of every rank writes the rank's shard and posts a note for rank 0 on a board (ranks/board.py): the shard's
listing, or an empty note if writing failed. Rank 0's thread waits for all notes and publishes the folder by a rename.
All ranks must see one file system, as for loading with another layout. Between steps a small collective exchanges the
cause of a failed checkpoint: a full disk could not hold a file with the cause.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from meshwright.compute.parameters.root import BLOCK_BYTES, root_text
from meshwright.data.files import sync
from meshwright.ranks.agreement import all_texts
from meshwright.ranks.board import await_path
from meshwright.ranks.errors import CheckpointError, MeshwrightError
from meshwright.ranks.mesh import Mesh
from meshwright.training.checkpoint.manifest import (
    Groups,
    Listing,
    Manifest,
    Origin,
    Progress,
    Roots,
    StoredFile,
    StoredRun,
    read_manifest,
    stored_file,
)
from meshwright.training.checkpoint.reader import newest_step, steps_in
from meshwright.training.checkpoint.restore import Piece
from meshwright.training.checkpoint.shard import Stored, write_shard
from meshwright.training.checkpoint.staging import Staging

PARTIAL = ".partial-"
VISIBLE_SECONDS = 10.0
"""Seconds for a network file system to show rank 0's new folder to other ranks."""
TEXT_LENGTH = 500
"""The most characters of a failure's text exchanged between ranks."""
ABANDONED = "\1"
"""The text of a failure that is only a consequence of another rank's failure."""
ENTRY_BYTES = 1000
"""Upper bound of a tensor's bytes in a shard's header and the manifest, without hashes of blocks."""

_LISTING = TypeAdapter(Listing)


class CheckpointWriter:
    """A writer of step folders in `folder`. Keeps this run's newest `keep` checkpoints, and the best one (named in the
    progress, training/best.py). Collective: all ranks construct it together.

    If a checkpoint cannot be written, the run goes on, and older checkpoints stay. Only `wait`, after the last
    checkpoint, raises. `unfinished` (on rank 0): checkpoints left incomplete by a killed run, now removed. `beside`:
    texts of further files of a step folder, by file name; rank 0's are written.
    """

    def __init__(self, folder: Path, mesh: Mesh, keep: int, origin: Origin, beside: Mapping[str, str]) -> None:
        self.folder = folder
        self.mesh = mesh
        self.keep = keep
        self.origin = origin
        self.beside = beside
        self.unfinished = self._clear() if mesh.rank == 0 else []
        before = list(self._written_before()) if mesh.rank == 0 else []
        self._own = {progress.step for progress in before}
        self._best = before[-1].best if before else None
        # A name unique to this writer, so that an earlier attempt's files are not mistaken for new files.
        token = torch.tensor([secrets.randbits(40)], dtype=torch.int64)
        mesh.world.broadcast(token, 0)
        self._token = f"{PARTIAL}{int(token):x}"
        self._board = mesh.transport.board(folder)
        self._staging = Staging(mesh.device)
        self._thread: threading.Thread | None = None
        self._step = 0
        self._failure = ""
        """The cause of this rank's failure in the last checkpoint; '' without a failure."""
        self._failing = False

    def save(self, progress: Progress, pieces: Iterable[Piece], data_root: str | None = None) -> list[str]:
        """Wait for the previous checkpoint, copy the pieces, and start to write the copies in the background.

        `data_root`: the hash of the order of data (parameters/root.py), given on rank 0.

        Returns notes to the user on the previous checkpoint and this one: the first of several failures, the end of
        failures, and on rank 0 that a removed folder was made again.
        """
        notes = self._notes(self._outcome())
        listed = list(pieces)
        tensors, await_copies = self._staging.copy([piece.tensor for piece in listed])
        copies = list(zip(listed, tensors, strict=True))
        needed = sum(tensor.nbytes + ENTRY_BYTES + 32 * (tensor.nbytes // BLOCK_BYTES) for _, tensor in copies)
        total = torch.tensor([needed], dtype=torch.int64)
        self.mesh.world.all_reduce(total)
        self._step = progress.step
        partial = self.folder / f"{self._token}-step-{progress.step}"
        if self.mesh.rank == 0 and not self.folder.exists():
            notes.append(
                f"warning: {self.folder} was removed during the run, and every checkpoint in it: it is made again"
            )
        self._failure = self._begin(partial, int(total)) if self.mesh.rank == 0 else ""
        # The ranks agree before any thread starts: all ranks write this checkpoint, or none.
        if problem := self._agree(self._failure):
            self._failure = self._failure or ABANDONED
            return notes + self._notes(problem)
        work = (partial, progress, copies, await_copies, data_root)
        self._thread = threading.Thread(target=self._guarded_write, args=work, name="checkpoint")
        self._thread.start()
        return notes

    def wait(self) -> None:
        """Wait until nothing is being written. Raises CheckpointError, on all ranks, if the last write failed."""
        if failure := self._outcome():
            newest = newest_step(self.folder)
            rest = f"the newest complete one is {newest}" if newest else "there is no complete one"
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {failure}; {rest}")

    def _outcome(self) -> str:
        """Wait for the thread; return the cause of a failed last checkpoint, equal on all ranks; '' if it succeeded."""
        if self._thread is not None:
            with self.mesh.transport.aside():
                self._thread.join()
            self._thread = None
        return self._agree(self._failure)

    def _agree(self, failure: str) -> str:
        """Return the first rank's failure that is a cause and not a consequence, equal on all ranks."""
        texts = all_texts(failure[:TEXT_LENGTH], self.mesh.world)
        if cause := next((text for text in texts if text and text != ABANDONED), ""):
            return cause
        # Consequences without a cause: a person or another program removed the folder.
        return "its folder was removed while it was written" if ABANDONED in texts else ""

    def _notes(self, failure: str) -> list[str]:
        """Return a note to the user when checkpoints begin to fail, and when checkpoints succeed again."""
        was, self._failing = self._failing, bool(failure)
        if failure and not was:
            return [f"warning: no checkpoint of step {self._step}: {failure}; training goes on with the older ones"]
        return ["checkpoints are written again"] if was and not failure else []

    def _begin(self, partial: Path, needed: int) -> str:
        """Create the temporary folder if there is room for the checkpoint; return the cause if not, else ''."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < needed:
                # The newest checkpoint is never removed before the next is complete, since a kill in between would
                # lose the run. So keep=1 needs room for two.
                self._prune(max(1, self.keep - 1))
            if (room := shutil.disk_usage(self.folder).free) < needed:
                stay = "; the newest stays until the next is complete" if self.keep == 1 else ""
                return f"it needs {needed:,} bytes, and {self.folder} has {room:,}{stay}"
            partial.mkdir()
        except OSError as error:
            return str(error)
        return ""

    def _written_before(self) -> Iterator[Progress]:
        """Yield the complete checkpoints that this run wrote before the resume, oldest first. The test is the run's
        random identity, not a name: another run's checkpoints, and imports, are never pruned."""
        for _, path in steps_in(self.folder):
            with suppress(CheckpointError):  # a damaged checkpoint is kept for inspection
                manifest = read_manifest(path)
                if self.origin.run and manifest.origin.run == self.origin.run:
                    yield manifest.progress

    def _prune(self, keep: int) -> None:
        """Remove this run's checkpoints except the newest `keep` and the best."""
        checkpoints = [(step, path) for step, path in steps_in(self.folder) if step in self._own]
        for step, path in checkpoints[:-keep]:
            if self._best is None or step != self._best.step:
                self._remove(path)

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

    def _guarded_write(
        self, partial: Path, progress: Progress, copies: list[tuple[Piece, Tensor]], await_copies: Callable[[], None],
        data_root: str | None,
    ) -> None:  # fmt: skip
        note = f"{partial.name}/rank-{self.mesh.rank}.json"
        """The board's key of this rank's note on the shard."""
        try:
            await_path(partial, VISIBLE_SECONDS)
            await_copies()
            groups, runs = runs_of((piece for piece, _ in copies), self.mesh)
            path, held = partial / f"rank-{self.mesh.rank}.safetensors", [copy for copy in copies if copy[1].numel()]
            file, root = write_shard(path, [stored_of(piece, tensor) for piece, tensor in held])
            sync(path)
            listing = Listing(file, groups, runs, root)
            self._board.post(note, _LISTING.dump_json(listing).decode())
            if self.mesh.rank == 0 and not self._publish(partial, progress, data_root):
                self._failure = ABANDONED
        except Exception as error:  # any exception: the step that waits for this thread must learn of it
            removed = not partial.exists() and not (self.folder / f"step-{progress.step}").exists()
            ours = isinstance(error, OSError | SafetensorError | MeshwrightError)  # with texts that need no class name
            text = str(error) if ours else f"{type(error).__name__}: {error}"
            self._failure = ABANDONED if removed else f"rank {self.mesh.rank}: {text}"
            with suppress(OSError):
                self._board.post(note, "")  # rank 0 need not wait
            with suppress(OSError):
                self._remove(partial)  # half a checkpoint is useless, and the disk may be full

    def _remove(self, path: Path) -> None:
        """Rename a folder, then remove it, so that no process sees half a folder, even ranks that still write files."""
        shutil.rmtree(path.rename(self.folder / f"{self._token}-gone-{self.mesh.rank}"))

    def _publish(self, partial: Path, progress: Progress, data_root: str | None) -> bool:
        """Wait for all shards and publish the checkpoint. False if a rank has failed."""
        notes = [f"{partial.name}/rank-{rank}.json" for rank in range(self.mesh.grid.world_size)]
        texts = self._board.collect(notes, self.mesh.timeout.wait)
        if not all(texts):
            return False
        files: list[StoredFile] = []
        groups: list[tuple[int, ...]] = []
        runs: list[StoredRun] = []
        hashes: list[int] = []
        for text in texts:
            listing = _LISTING.validate_json(text)
            hashes.append(listing.root)
            files.append(listing.file)  # in rank order, so that a group of ranks is a group of files
            runs += (replace(run, group=run.group + len(groups)) for run in listing.runs)
            groups += listing.groups
        for name, text in self.beside.items():
            path = partial / name
            path.write_text(text, encoding="utf-8")
            sync(path)
            files.append(stored_file(path))
        roots = Roots(root_text(hashes), data_root)
        sync(Manifest(progress, self.origin, tuple(files), tuple(groups), tuple(runs), roots).write(partial))
        sync(partial)
        # Files are synced before the folder, and the folder before the rename: after a power cut the step is whole or
        # absent.
        target = self.folder / f"step-{progress.step}"
        if target.exists():
            self._remove(target)
        partial.rename(target)
        sync(self.folder)
        self._own.add(progress.step)
        self._best = progress.best
        self._prune(self.keep)
        return True


def key_of(piece: Piece) -> str:
    """Return a piece's key in a shard, unique since a rank has at most one box of a parameter."""
    return f"{piece.kind}/{piece.region.name}"


def stored_of(piece: Piece, values: Tensor) -> Stored:
    """Convert a piece, with values on the host, for a shard: in the box's shape if the piece is the whole box, else
    flat."""
    region, whole = piece.region, values.numel() == piece.region.box.num_elements
    held = values.view(region.box.lengths) if whole else values
    return Stored(key_of(piece), f"{piece.kind} of {region.name}", region.shape, region.box, held, piece.first)


def runs_of(pieces: Iterable[Piece], mesh: Mesh) -> tuple[Groups, tuple[StoredRun, ...]]:
    """List this rank's groups and runs. Of the ranks that share a region only the first lists the run.

    So a thousand ranks list no more runs than one rank would, and rank 0 reads no more.
    """
    groups: dict[tuple[int, ...], int] = {}
    runs = []
    for piece in pieces:
        region, axes = piece.region, piece.slices.axes
        if mesh.index(*axes) == 0:
            group = groups.setdefault(mesh.grid.group(mesh.rank, *axes), len(groups))
            start, length = (region.start, piece.slices.length) if axes else (0, region.box.num_elements)
            box = (region.shape, region.box.offsets, region.box.lengths)
            dtype = str(piece.tensor.dtype).removeprefix("torch.")
            runs.append(StoredRun(region.name, piece.kind, *box, dtype, key_of(piece), group, start, length))
    return tuple(groups), tuple(runs)
