"""A checkpoint's manifest.json: a typed model that refuses inconsistent entries, and a checksum.

The manifest's size grows with parameters, not with parameters times ranks: one line, a `StoredRun`, describes how a
thousand ranks share a parameter. Each shard's header lists the shard's own bytes (shard.py).

A manifest is untrusted input. File names must be plain names inside the folder, and every part must be in a listed
file. A tensor's runs must be disjoint and cover the tensor. So every number read has been written and checked.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from meshwright.compute.parameters.root import VERSION
from meshwright.compute.parameters.shard import Box
from meshwright.ranks.errors import CheckpointError, DamagedError
from meshwright.ranks.foreign import open_plain, parse_json, read_text
from meshwright.version import __version__

FORMAT_VERSION = 4
"""Format 4 has hashes of blocks in the shards, which sum to the root. Format 3 had SHA-256 digests of blocks; format 2
an entry for every box of every rank, and no run; format 1 (version 0.1.0) listed shards only. All can be read."""
MANIFEST = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
GET_ANOTHER = "take another checkpoint, or restore this one from a copy"

_CLOSED = ConfigDict(extra="forbid", strict=True)
_CHECKSUM = ',\n "checksum": "'
"""Separates the file's content from the checksum of the content's bytes. (Format 1's checksum was of the parsed
content: a number's `e` could become `E` unseen.)"""

NonNegative = Annotated[int, Field(ge=0, lt=2**62)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]
"""A name without separators, so that the file is inside the checkpoint's folder."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Root = Annotated[str, Field(pattern=rf"^({VERSION})?[0-9a-f]{{16}}$")]
DType = Annotated[str, Field(pattern=r"^(float64|float32|bfloat16|float16)$")]


@dataclass(frozen=True, config=_CLOSED)
class StoredRun:
    """A `kind` (weight, exp_avg, ...) of a `box` of a parameter, in equal slices stored in the files of a group.

    The box's elements, row by row, have the numbers start, start + 1, ... in flat memory. The group's i-th file holds
    the box's elements with numbers i·length to (i + 1)·length, under `key`. The format has boxes and slices only, no
    layouts, so any layout can read a checkpoint.
    """

    parameter: str
    kind: str
    shape: Annotated[tuple[NonNegative, ...], Field(min_length=1)]
    offsets: tuple[NonNegative, ...]
    lengths: tuple[NonNegative, ...]
    dtype: DType
    key: str
    group: NonNegative
    start: NonNegative
    length: Annotated[NonNegative, Field(gt=0)]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)

    @property
    def stop(self) -> int:
        return self.start + self.box.num_elements

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = vars(torch)[self.dtype]
        return dtype

    def bounds(self, slice_index: int) -> tuple[int, int]:
        """Return the number of the box's first element in a file, and the number after the last."""
        first, last = slice_index * self.length, (slice_index + 1) * self.length
        return max(first, self.start) - self.start, min(last, self.stop) - self.start


@dataclass(frozen=True, config=_CLOSED)
class StoredPart:
    """A stored tensor in formats 1 and 2: a box in a file."""

    parameter: str
    kind: str
    shape: tuple[NonNegative, ...]
    offsets: tuple[NonNegative, ...]
    lengths: tuple[NonNegative, ...]
    dtype: DType
    file: FileName
    key: str


@dataclass(frozen=True, config=_CLOSED)
class StoredFile:
    """A file's name, size and SHA-256. For a shard the digest covers the first `header_bytes`, which hold the hashes of
    the rest; for other files (None) it covers the whole file."""

    file: FileName
    size_bytes: NonNegative
    sha256: Sha256
    header_bytes: NonNegative | None = None


Groups = tuple[tuple[NonNegative, ...], ...]
"""Groups of files that share the slices of a run, as indices into the list of files; in a rank's listing, as rank
numbers."""


@dataclass(frozen=True, config=_CLOSED)
class Listing:
    """A rank's file, and the runs listed by this rank as the first of their group. `root`: the sum of the file's
    hashes."""

    file: StoredFile
    groups: Groups
    runs: tuple[StoredRun, ...]
    root: int


@dataclass(frozen=True, config=_CLOSED)
class Best:
    """A run's best validation: step and value; `worse`: number of later validations that were no better."""

    step: NonNegative
    metric: Annotated[str, Field(pattern=r"^[a-z_]+$")]
    value: Annotated[float, Field(allow_inf_nan=False)]
    worse: NonNegative = 0


@dataclass(frozen=True, config=_CLOSED)
class Progress:
    """A run's progress: steps done, samples seen (the data cursor), optimizer steps applied, loss scaling, the best.

    Random numbers need no state: every microbatch's generator is seeded by the run's seed, the step and the place.
    """

    step: NonNegative = 0
    samples: NonNegative = 0
    steps_taken: NonNegative = 0
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    good_steps: NonNegative = 0
    best: Best | None = None


@dataclass(frozen=True, config=_CLOSED)
class Origin:
    """The run that wrote a checkpoint. `run`: the run's random identity, kept by resumes; '' for an import."""

    config: dict[str, Any]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    data: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    """The fingerprint of the prepared data (data/section.py)."""
    resolved: dict[str, Any] = Field(default_factory=dict)
    """Values decided for `auto` fields, if another decision could change the run's bits."""
    version: str = __version__
    torch: str = str(torch.__version__)


@dataclass(frozen=True, config=_CLOSED)
class Roots:
    """Hashes of a checkpoint that do not depend on the layout (parameters/root.py): of all tensors, and of the order of
    data after the cursor. None: the checkpoint's writer had no roots, or an import no data."""

    state: Root | None = None
    data: Root | None = None


@dataclass(frozen=True, config=_CLOSED)
class Manifest:
    """A checkpoint's description: everything except the tensors."""

    progress: Progress
    origin: Origin
    files: tuple[StoredFile, ...]
    groups: Groups
    runs: Annotated[tuple[StoredRun, ...], Field(repr=False)]
    roots: Roots = Roots()

    def write(self, folder: Path) -> Path:
        lines = [f' "format": {FORMAT_VERSION}']
        for name, value in asdict(self).items():
            # One line a run, so that people can read and search the file.
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value) if isinstance(value, tuple) else None
            lines.append(f' "{name}": ' + (json.dumps(value) if rows is None else f"[\n{rows}\n ]"))
        path = folder / MANIFEST
        path.write_text(_with_checksum("{\n" + ",\n".join(lines)), encoding="utf-8")
        return path

    @cached_property
    def parts(self) -> dict[tuple[str, str], list[StoredRun]]:
        """Group the runs by parameter and kind."""
        parts: defaultdict[tuple[str, str], list[StoredRun]] = defaultdict(list)
        for run in self.runs:
            parts[run.parameter, run.kind].append(run)
        return dict(parts)


def stored_file(path: Path) -> StoredFile:
    """Return the entry of an existing file, with size and SHA-256."""
    with open_plain(path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return StoredFile(path.name, path.stat().st_size, digest)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: the manifest is missing, damaged, of another format, or inconsistent.
    """
    path = folder / MANIFEST
    try:
        text = read_text(path)
        body = parse_json(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read: {error}; {GET_ANOTHER}") from error
    if not isinstance(body, dict) or "checksum" not in body or "format" not in body:
        raise DamagedError(f"{path} is damaged: it has no checksum or no format; {GET_ANOTHER}")
    version, checksum = body.pop("format"), body.pop("checksum")
    # The checksum is checked before the content is used: damaged bytes may parse to anything.
    if version in (2, 3, FORMAT_VERSION):
        right = text == _with_checksum(text.rpartition(_CHECKSUM)[0])
    elif version == 1:
        summed = json.dumps({"format": 1, **body}, sort_keys=True)
        right = checksum == hashlib.sha256(summed.encode()).hexdigest()
    else:
        reads = f"this version ({__version__}) reads formats 1 to {FORMAT_VERSION}"
        raise CheckpointError(f"{path} has format {version}; {reads}: a newer meshwright may read it, or it is damaged")
    if not right:
        raise DamagedError(f"{path} is damaged: its checksum does not match its content; {GET_ANOTHER}")
    try:
        # Upgraded format by format, so that each step handles one older format.
        if version == 1:  # version 0.1.0 named no run, data or tokenizer
            rest = {key: value for key, value in body.items() if key not in ("seed", "config", "shards")}
            origin = {"config": body.get("config"), "version": "0.1.0", "torch": "unknown"}
            body = {**rest, "origin": origin, "files": body.get("shards")}
        body = _of_format_2(body) if version in (1, 2) else body
        manifest = _MANIFEST.validate_json(json.dumps(body))
        _check(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise DamagedError(f"{path} is no manifest of a checkpoint: {where}: {first['msg']}; {GET_ANOTHER}") from error
    except ValueError as error:
        raise DamagedError(f"{path} does not hold together: {error}; {GET_ANOTHER}") from error
    return manifest


_MANIFEST = TypeAdapter(Manifest)
_ENTRIES = TypeAdapter(tuple[StoredPart, ...])


def _of_format_2(body: dict[str, Any]) -> dict[str, Any]:
    """Upgrade a manifest of format 2: each entry (a box in a file) becomes a run of one file."""
    rest = {key: value for key, value in body.items() if key != "entries"}
    files = TypeAdapter(tuple[StoredFile, ...]).validate_json(json.dumps(body.get("files")))
    group = {file.file: index for index, file in enumerate(files)}
    runs = []
    for entry in _ENTRIES.validate_json(json.dumps(body.get("entries"))):
        if entry.file not in group:
            raise ValueError(f"{entry.parameter} ({entry.kind}) lies in {entry.file}, which is not among its files")
        fields = asdict(entry)
        file_index = group[fields.pop("file")]
        # Empty boxes were listed as well; a run has at least one element.
        if length := math.prod(entry.lengths):
            runs.append(fields | {"group": file_index, "start": 0, "length": length})
    return {**rest, "groups": [[index] for index in range(len(files))], "runs": runs}


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless files are named once and large enough for their parts, and every tensor is whole."""
    if len({file.file for file in manifest.files}) < len(manifest.files):
        raise ValueError("it lists a file twice")
    for group in manifest.groups:
        if len(set(group)) < len(group) or any(index >= len(manifest.files) for index in group):
            raise ValueError("a group names a file twice, or one that is not among its files")
    # Otherwise a short file would only be noticed when read, perhaps hours into a job.
    left = [file.size_bytes for file in manifest.files]
    for index, taken in _bytes_in_files(manifest).items():
        if taken > left[index]:
            raise ValueError(f"{manifest.files[index].file} is smaller than the parts that lie in it")
    for (parameter, state_name), runs in manifest.parts.items():
        shape = runs[0].shape  # shapes of an optimizer's states may differ from the weight's
        if any(run.shape != shape for run in runs):
            raise ValueError(f"the parts of {parameter} ({state_name}) disagree on its shape")
        if any(run.dtype != runs[0].dtype for run in runs):
            raise ValueError(f"the parts of {parameter} ({state_name}) disagree on its dtype")
        if (wrong := _uncovered([run.box for run in runs], shape)) is not None:
            raise ValueError(f"the parts of {parameter} ({state_name}) {wrong}")


def _bytes_in_files(manifest: Manifest) -> dict[int, int]:
    """Count the bytes of runs in each file. Raises ValueError for a run that is longer than the run's group.

    A run's bytes are the bytes up to the run's end minus the bytes up to its start. Elements up to x fill every file
    but the last one. So a run changes two entries, and one pass over the files counts all runs.
    """
    full = [[0] * (len(group) + 1) for group in manifest.groups]
    """By group and position: bytes in each file before that position."""
    ends = [[0] * (len(group) + 1) for group in manifest.groups]
    for run in manifest.runs:
        name = f"{run.parameter} ({run.kind})"
        if run.group >= len(manifest.groups):
            raise ValueError(f"{name} lies in a group of files that it does not list")
        if run.stop > len(manifest.groups[run.group]) * run.length:
            raise ValueError(f"{name} has more slices than its group has files")
        for x, size in ((run.stop, run.torch_dtype.itemsize), (run.start, -run.torch_dtype.itemsize)):
            position, rest = divmod(x, run.length)
            full[run.group][position] += run.length * size
            ends[run.group][position] += rest * size
    taken: defaultdict[int, int] = defaultdict(int)
    for group, before, at in zip(manifest.groups, full, ends, strict=True):
        whole = before[-1]
        for position in reversed(range(len(group))):
            taken[group[position]] += whole + at[position]
            whole += before[position]
    return taken


def _uncovered(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Say why boxes do not cover each element of a tensor of `shape` once; None if each is covered once."""
    for box in boxes:
        if not len(box.offsets) == len(box.lengths) == len(shape):
            return "have another number of dims than its shape"
        if any(start + length > size for start, length, size in zip(box.offsets, box.lengths, shape, strict=True)):
            return "reach beyond its shape"
    filled = [box for box in boxes if box.num_elements]
    if sum(box.num_elements for box in filled) < math.prod(shape):
        return "do not cover it"
    if not shape:
        return "overlap" if len(filled) > 1 else None
    # The boxes have the right number of elements, so disjoint boxes also cover the tensor. A sweep along the dim with
    # the most cuts compares a box with the boxes that began before and have not ended: n log n for slices, n^1.5 for
    # blocks. Comparing all pairs took quadratic time for a thousand ranks.
    dim = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in filled}))
    begun: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offsets[dim]):
        begun = [earlier for earlier in begun if earlier.offsets[dim] + earlier.lengths[dim] > box.offsets[dim]]
        if any(box.intersection(earlier) for earlier in begun):
            return "overlap"
        begun.append(box)
    return None


def _with_checksum(content: str) -> str:
    """Return the file's text: `content` (a JSON object without the closing brace), the checksum of `content`, and the
    brace."""
    return f'{content}{_CHECKSUM}{hashlib.sha256(content.encode()).hexdigest()}"\n}}'
