"""What a checkpoint's manifest.json says, and its checksum over itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.shard import Box

FORMAT = 1
MANIFEST = "manifest.json"
REMEDY = "remove its folder to go on from an older checkpoint"


@dataclass(frozen=True)
class Entry:
    """One stored tensor: the `box` of the parameter's `kind` (weight, exp_avg, ...), under `key` in `file`."""

    parameter: str
    kind: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str
    file: str
    key: str

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True)
class Shard:
    """A shard file's name, size and SHA-256."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, samples seen (the data cursor), optimizer steps applied, loss scaling.

    Random numbers need no state: every microbatch's generator is seeded by the run's seed, the step and its place.
    """

    step: int = 0
    samples: int = 0
    steps_taken: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers."""

    progress: Progress
    seed: int
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    entries: tuple[Entry, ...] = field(repr=False)

    def write(self, folder: Path) -> Path:
        body = {"format": FORMAT, **asdict(self)}
        path = folder / MANIFEST
        path.write_text(json.dumps({**body, "checksum": _checksum(body)}, indent=1))
        return path


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError where it is missing, damaged or of another format."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {REMEDY}") from error
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content; {REMEDY}")
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}; this version reads format {FORMAT}")
    return Manifest(
        Progress(**body["progress"]),
        body["seed"],
        body["config"],
        tuple(Shard(**shard) for shard in body["shards"]),
        tuple(entry_of(entry) for entry in body["entries"]),
    )


def entry_of(fields: dict[str, Any]) -> Entry:
    """An entry from its JSON form, where tuples have become lists."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Entry(**values)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
