"""Reading a checkpoint written by any layout: any box of any tensor."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from meshwright.compute.models.adapter_section import INSIDE
from meshwright.compute.parameters.shard import Box
from meshwright.config import Config
from meshwright.config.load import model_names
from meshwright.config.messages import problems_of
from meshwright.ranks.errors import CheckpointError, DamagedError
from meshwright.ranks.foreign import plain, plain_folder
from meshwright.training.checkpoint.manifest import (
    GET_ANOTHER,
    MANIFEST,
    StoredFile,
    StoredRun,
    read_manifest,
    stored_file,
)
from meshwright.training.checkpoint.shard import BadBlock, StoredShard
from meshwright.version import __version__

STEP = re.compile(r"step-(\d+)")
FIRST = "step-0"
"""The checkpoint with the weights that a run begins from."""
BASE = "base"
"""The key in `Origin.resolved` of the hash of the weights next to which adapters were trained."""


class Checkpoint:
    """An open checkpoint folder. Bytes are checked before use; no other bytes are hashed.

    `bad`: a list that collects damaged blocks; by default the first damaged block raises DamagedError.
    """

    def __init__(self, folder: Path, bad: list[BadBlock] | None = None) -> None:
        self.folder = folder
        self._bad = bad
        self.manifest = read_manifest(folder)
        self.shards: dict[str, StoredShard] = {}
        """The opened shards, by file."""
        self._runs: dict[int, list[StoredRun]] = defaultdict(list)
        """The runs of each group of files."""
        for run in self.manifest.runs:
            self._runs[run.group].append(run)
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By file: (group, position of the file in the group)."""
        for group_index, group in enumerate(self.manifest.groups):
            for slice_index, index in enumerate(group):
                self._places[self.manifest.files[index].file].append((group_index, slice_index))
        for file in self.manifest.files:
            path = folder / file.file
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DamagedError(f"{path} is missing; {GET_ANOTHER}") from error
            # File sizes are checked now, at no cost; contents when read.
            if size != file.size_bytes:
                raise DamagedError(f"{path} is damaged: {size} bytes, not {file.size_bytes}; {GET_ANOTHER}")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every parameter."""
        stored = {run.parameter: run.shape for run in self.manifest.runs if run.kind == "weight"}
        return stored if self.base is None else self.base.shapes | stored

    @cached_property
    def base(self) -> Checkpoint | None:
        """The checkpoint of the run's first step, with the frozen weights, if this one has adapters alone.

        Raises CheckpointError if that checkpoint is missing, or another than this one was trained from.
        """
        wanted = self.manifest.origin.resolved.get(BASE)
        if wanted is None:
            return None
        folder = self.folder.parent / FIRST
        source = self.manifest.origin.config.get("weights")
        again = f"`meshwright convert import {source} --out {folder}` makes it again"
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(f"{self.folder} has adapters alone, and {folder} with their base is missing: {again}")
        base = Checkpoint(folder, self._bad)
        if base.frozen_root != wanted:
            raise CheckpointError(
                f"{self.folder} was trained from other weights than those of {folder} (root {wanted}, and there is "
                f"{base.frozen_root}): {again}, from the folder of that time"
            )
        return base

    @property
    def frozen_root(self) -> str:
        """A hash of the files with weights, except the files with adapters, which an import writes last."""
        adapted = {index for run in self.manifest.runs if INSIDE in run.parameter
                   for index in self.manifest.groups[run.group]}  # fmt: skip
        files = (file for index, file in enumerate(self.manifest.files) if index not in adapted)
        hashes = sorted(file.sha256 for file in files if file.header_bytes is not None)
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]

    def holder(self, parameter: str, state_name: str) -> Checkpoint:
        """Return the checkpoint that has a tensor: this one, or the base of adapters."""
        if state_name != "weight" or (parameter, state_name) in self.manifest.parts or self.base is None:
            return self
        return self.base

    @property
    def config(self) -> Config:
        """Return the writing run's config. Raises CheckpointError if this version has other fields."""
        origin = self.manifest.origin
        try:
            return Config.model_validate(origin.config)  # data files may be missing: only a new run needs them
        except ValidationError as error:
            first = problems_of(error, model_names())[0]
            raise CheckpointError(
                f"{self.folder} has a config that this version ({__version__}) does not read: {first}; it was written "
                f"by meshwright {origin.version}: read it with that one, or with a newer one than both"
            ) from error

    def dtype_of(self, parameter: str) -> str:
        """Return the dtype of a parameter's stored weight. Raises CheckpointError if there is no such weight."""
        runs = self.holder(parameter, "weight").manifest.parts.get((parameter, "weight"))
        if runs is None:
            raise CheckpointError(f"{self.folder} has no weight of {parameter}")
        return runs[0].dtype

    def read(self, parameter: str, state_name: str, box: Box) -> Tensor:
        """Read a box of a parameter's tensor in the stored dtype, from all parts that overlap the box."""
        if (holder := self.holder(parameter, state_name)) is not self:
            return holder.read(parameter, state_name, box)
        runs = self.manifest.parts.get((parameter, state_name))
        if runs is None:
            known = sorted({state_name for name, state_name in self.manifest.parts if name == parameter})
            holds = f"holds only {', '.join(known)} of it" if known else "does not have this parameter"
            raise CheckpointError(f"{self.folder} has no {state_name} of {parameter}: it {holds}")
        shape = runs[0].shape
        assert all(extent.stop <= size for extent, size in zip(box.slices, shape, strict=True)), f"{box} of {shape}"
        result = torch.empty(box.lengths, dtype=runs[0].torch_dtype)
        for run in runs:  # disjoint boxes that cover the tensor: the manifest was checked
            if (common := run.box.intersection(box)) is not None:
                self._read_run(run, common.within(run.box), result[common.within(box).slices])
        return result

    def file(self, name: str) -> Path | None:
        """Check a file other than the shards, and return its path; None if there is no such file.

        A file not in the manifest was added by the user on request (an import's tokenizer), and is not checked.
        """
        for file in self.manifest.files:
            if file.file == name:
                self._check(file)
        return plain(self.folder / name) if (self.folder / name).is_file() else None

    def check_files(self) -> None:
        """Check every file. Raises DamagedError."""
        for file in self.manifest.files:
            self._check(file)

    def damage_besides(self) -> Iterator[DamagedError]:
        """Check the bytes that are skipped by a `read` of every tensor: other files, and tensors that no run names."""
        for file in self.manifest.files:
            try:
                if file.header_bytes is None:
                    self._check(file)
                else:
                    self._shard(file).check({run.key for run, _ in self._parts_in(file)})
            except DamagedError as error:
                yield error

    def check_frames(self, first: int, of: int) -> None:
        """Check the parts that `read` may skip of every `of`-th file from `first` on: a shard's header, all of another
        file. (Replicas' shards hold no tensor, and no rank reads one.) Raises DamagedError."""
        for file in self.manifest.files[first::of]:
            if file.header_bytes is None:
                self._check(file)
            else:
                self._shard(file)

    def _read_run(self, run: StoredRun, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of a run; `box` is relative to the corner of the run's box."""
        whole = Box(tuple(0 for _ in run.lengths), run.lengths)
        # The row-by-row numbers, in the run's box, of the first and last element. In between are rows and gaps.
        begin = last = 0
        for cut, length in zip(box.slices, run.lengths, strict=True):
            begin, last = begin * length + cut.start, last * length + cut.stop - 1
        # Elements without gaps are read directly into `out`.
        flat = out.view(-1) if out.is_contiguous() and last + 1 - begin == out.numel() else None
        # The group's files that hold these elements, by position.
        for slice_index in range((run.start + begin) // run.length, (run.start + last) // run.length + 1):
            start, stop = run.bounds(slice_index)
            shard = self._shard(self.manifest.files[self.manifest.groups[run.group][slice_index]])
            first, end = max(begin, start), min(last + 1, stop)
            into = None if flat is None else flat[first - begin : end - begin]
            for offset, values in shard.elements(run, slice_index, first - start, end - start, into):
                if into is not None and 0 <= values.data_ptr() - into.data_ptr() < into.nbytes:
                    continue  # already read into `out`
                position = 0
                # A slice of flat memory is up to three boxes: part of a row, whole rows, part of a row.
                for rows in whole.flat_parts(start + offset, start + offset + values.numel()):
                    if (common := rows.intersection(box)) is not None:
                        there = values[position : position + rows.num_elements].view(rows.lengths)
                        out[common.within(box).slices] = there[common.within(rows).slices]
                    position += rows.num_elements

    def _shard(self, file: StoredFile) -> StoredShard:
        if file.file not in self.shards:
            self.shards[file.file] = StoredShard(self.folder / file.file, file, self._parts_in(file), self._bad)
        return self.shards[file.file]

    def _parts_in(self, file: StoredFile) -> Iterator[tuple[StoredRun, int]]:
        """Yield the runs with a part in a file, and the part's number."""
        for group, slice_index in self._places[file.file]:
            yield from ((run, slice_index) for run in self._runs[group])

    def _check(self, file: StoredFile) -> None:
        if file.header_bytes is not None:
            self._shard(file).check()
            return
        path = self.folder / file.file
        try:
            whole = stored_file(path) == file
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {GET_ANOTHER}") from error
        if not whole:
            raise DamagedError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {GET_ANOTHER}")


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """List the complete checkpoints in a folder, oldest first."""
    steps = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP.fullmatch(path.name))]
    return sorted((step, path) for step, path in steps if (path / MANIFEST).is_file())


def newest_step(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder of step folders, or None."""
    steps = steps_in(folder)
    return steps[-1][1] if steps else None


def newest_whole(folder: Path, before: int) -> Path | None:
    """Return the newest undamaged checkpoint before step `before`, or None."""
    for step, path in reversed(steps_in(folder)):
        if step < before:
            try:
                Checkpoint(path).check_files()
            except CheckpointError:
                continue
            return path
    return None


BEST = "best"
"""The name, in a run's folder or in `checkpoints`, of the checkpoint with the best validation."""


def find_checkpoint(path: Path) -> Path:
    """Find a checkpoint by the step's folder, or the newest by the run's folder or `checkpoints` folder.

    The name `best` in one of the latter two is the best checkpoint, which is named in the newest one's progress.

    Raises:
        CheckpointError: nothing was found; the error names the expected files.
    """
    if (path / MANIFEST).is_file():
        return plain_folder(path)
    if path.name == BEST and not path.exists():
        last = find_checkpoint(path.parent)
        best = read_manifest(last).progress.best
        if best is None:
            raise CheckpointError(f"{last} tells of no best validation: checkpoint.best=true keeps one")
        if not (last.with_name(f"step-{best.step}") / MANIFEST).is_file():
            raise CheckpointError(f"{last} says that step-{best.step} is the best, and it is not there any more")
        return plain_folder(plain(last.with_name(f"step-{best.step}"), path.parent))
    for folder in (path / "checkpoints", path):
        if (newest := newest_step(folder)) is not None:
            return plain_folder(plain(newest, path))
    raise CheckpointError(f"{path} holds no checkpoint: neither {MANIFEST} nor checkpoints/step-N nor step-N")
