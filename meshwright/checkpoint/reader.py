"""Reading a checkpoint: any box of any tensor, whatever the layout that wrote it."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.checkpoint.manifest import MANIFEST, REMEDY, Entry, read_manifest
from meshwright.config import Config
from meshwright.errors import CheckpointError
from meshwright.shard import Box

STEP = re.compile(r"step-(\d+)")


class Checkpoint:
    """An open checkpoint folder. A shard's checksum is checked before the first number is read from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._unchecked = {shard.file: shard for shard in self.manifest.shards}
        self._entries: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in self.manifest.entries:
            self._entries[entry.parameter, entry.kind].append(entry)
        for shard in self.manifest.shards:
            path = folder / shard.file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; {REMEDY}")
            if path.stat().st_size != shard.size_bytes:
                found = path.stat().st_size
                raise CheckpointError(f"{path} is damaged: {found} bytes, not {shard.size_bytes}; {REMEDY}")

    @property
    def config(self) -> Config:
        """The config of the run that wrote it."""
        return Config.model_validate(self.manifest.config)  # its files may be gone: only a new run needs them

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every parameter."""
        return {entry.parameter: entry.shape for entry in self.manifest.entries if entry.kind == "weight"}

    @property
    def kinds(self) -> frozenset[str]:
        """What it holds of parameters: weight, exp_avg, ..."""
        return frozenset(kind for _, kind in self._entries)

    def read(self, parameter: str, kind: str, box: Box) -> Tensor:
        """The box of a parameter's tensor, put together from the parts that meet it, in the dtype it was stored in."""
        entries = self._entries.get((parameter, kind))
        if entries is None:
            known = sorted({kind for name, kind in self._entries if name == parameter})
            holds = f"holds only {', '.join(known)} of it" if known else "does not have this parameter"
            raise CheckpointError(f"{self.folder} has no {kind} of {parameter}: it {holds}")
        result: Tensor | None = None
        missing = box.num_elements
        for entry in entries:
            common = entry.box.intersection(box)
            if common is None:
                continue
            part = self._read_part(entry, common.within(entry.box))
            result = torch.empty(box.lengths, dtype=part.dtype) if result is None else result
            result[common.within(box).slices] = part
            missing -= common.num_elements
        if result is None or missing != 0:
            raise CheckpointError(f"{self.folder}: {missing} elements of {parameter} ({kind}) are not in it")
        return result

    def _read_part(self, entry: Entry, box: Box) -> Tensor:
        self._check(entry.file)
        with safe_open(self.folder / entry.file, framework="pt") as file:
            part: Tensor = file.get_slice(entry.key)[box.slices]
        return part

    def _check(self, file: str) -> None:
        shard = self._unchecked.pop(file, None)
        if shard is None:
            return
        with (self.folder / file).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != shard.sha256:
            raise CheckpointError(
                f"{self.folder / file} is damaged: its SHA-256 is not the one in {MANIFEST}; {REMEDY}"
            )


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints in a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if (path / MANIFEST).is_file())


def newest_step(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder of step folders, or None."""
    found = steps_in(folder)
    return found[-1][1] if found else None


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
