"""Reading a checkpoint: any box of any tensor, whatever the layout that wrote it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright import __version__
from meshwright.checkpoint.manifest import GET_ANOTHER, MANIFEST, StoredPart, read_manifest, stored_file
from meshwright.config import Config
from meshwright.config.load import model_names
from meshwright.config.messages import problems_of
from meshwright.errors import CheckpointError, DamagedError
from meshwright.parameters.shard import Box

STEP = re.compile(r"step-(\d+)")


class Checkpoint:
    """An open checkpoint folder. A file's checksum is checked before the first byte of it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._unchecked = {file.file: file for file in self.manifest.files}
        for file in self.manifest.files:
            path = folder / file.file
            if not path.is_file():
                raise DamagedError(f"{path} is missing; {GET_ANOTHER}")
            if (size := path.stat().st_size) != file.size_bytes:
                raise DamagedError(f"{path} is damaged: {size} bytes, not {file.size_bytes}; {GET_ANOTHER}")

    @property
    def config(self) -> Config:
        """The config of the run that wrote it. Raises CheckpointError where this version has other fields."""
        origin = self.manifest.origin
        try:
            return Config.model_validate(origin.config)  # its files may be gone: only a new run needs them
        except ValidationError as error:
            first = problems_of(error, model_names())[0]
            raise CheckpointError(
                f"{self.folder} has a config that this version ({__version__}) does not read: {first}; it was written "
                f"by meshwright {origin.version}: read it with that one, or with a newer one than both"
            ) from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every parameter."""
        return {entry.parameter: entry.shape for entry in self.manifest.entries if entry.kind == "weight"}

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of tensors that it has of parameters: weight, exp_avg, ..."""
        return frozenset(kind for _, kind in self.manifest.parts)

    def read(self, parameter: str, kind: str, box: Box) -> Tensor:
        """The box of a parameter's tensor, put together from the parts that meet it, in the dtype it was stored in."""
        entries = self.manifest.parts.get((parameter, kind))
        if entries is None:
            known = sorted({kind for name, kind in self.manifest.parts if name == parameter})
            holds = f"holds only {', '.join(known)} of it" if known else "does not have this parameter"
            raise CheckpointError(f"{self.folder} has no {kind} of {parameter}: it {holds}")
        shape = entries[0].shape
        assert all(part.stop <= size for part, size in zip(box.slices, shape, strict=True)), f"{box} of {shape}"
        result = torch.empty(box.lengths, dtype=entries[0].torch_dtype)
        for entry in entries:  # disjoint parts that cover the tensor: the manifest was checked
            if (common := entry.box.intersection(box)) is not None:
                result[common.within(box).slices] = self._read_part(entry, common.within(entry.box))
        return result

    def file(self, name: str) -> Path | None:
        """The path of a file beside the shards, once it is known to be whole; None where there is none.

        A file that the manifest does not list was put there by the user, who was asked to (an import's tokenizer).
        """
        self._check(name)
        return self.folder / name if (self.folder / name).is_file() else None

    def check_files(self, part: int = 0, of: int = 1) -> None:
        """Check every file, or every `of`-th from `part` on, so that `of` ranks check all. Raises CheckpointError."""
        for file in self.manifest.files[part::of]:
            self._check(file.file)

    def _read_part(self, entry: StoredPart, box: Box) -> Tensor:
        self._check(entry.file)
        path = self.folder / entry.file
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice(entry.key)
                shape = tuple(stored.get_shape())
                part: Tensor = stored[box.slices] if box.lengths else file.get_tensor(entry.key)
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedError(f"{path} holds no {entry.key} that can be read: {error}; {GET_ANOTHER}") from error
        dtype = str(part.dtype).removeprefix("torch.")
        if (shape, dtype) != (entry.lengths, entry.dtype):
            wanted = f"{entry.dtype} {list(entry.lengths)}"
            raise DamagedError(f"{path}: {entry.key} is {dtype} {list(shape)}, not {wanted}; {GET_ANOTHER}")
        return part

    def _check(self, name: str) -> None:
        file = self._unchecked.get(name)
        if file is None:
            return
        path = self.folder / name
        try:
            whole = stored_file(path) == file
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {GET_ANOTHER}") from error
        if not whole:
            raise DamagedError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {GET_ANOTHER}")
        del self._unchecked[name]


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints in a folder, oldest first."""
    steps = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP.fullmatch(path.name))]
    return sorted((step, path) for step, path in steps if (path / MANIFEST).is_file())


def newest_step(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder of step folders, or None."""
    steps = steps_in(folder)
    return steps[-1][1] if steps else None


def newest_whole(folder: Path, before: int) -> Path | None:
    """The newest checkpoint before step `before` whose files are all what they were when they were written."""
    for step, path in reversed(steps_in(folder)):
        if step < before:
            try:
                Checkpoint(path).check_files()
            except CheckpointError:
                continue
            return path
    return None


def find_checkpoint(path: Path) -> Path:
    """A checkpoint by its own folder, by the run's, or by the run's `checkpoints` folder (then the newest).

    Raises CheckpointError with what was looked for.
    """
    if (path / MANIFEST).is_file():
        return path
    for folder in (path / "checkpoints", path):
        if (newest := newest_step(folder)) is not None:
            return newest
    raise CheckpointError(f"{path} holds no checkpoint: neither {MANIFEST} nor checkpoints/step-N nor step-N")
