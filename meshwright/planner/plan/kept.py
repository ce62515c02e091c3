"""Recordings kept on disk between runs: a second plan of a model records nothing.

A file has the recordings of one model, data and precision under one software on one kind of device. Its first line
names these, the version of torch and a digest of this package's code; a file with another first line is not read. The
rest is compressed JSON, a recording a line. A damaged file, or one of another form, counts as none.

| in a line       | is                                                                            |
|-----------------|-------------------------------------------------------------------------------|
| key             | a digest of the fields on which the recording depends, of its part and input  |
| events          | distinct kernels, collectives, copies and waits                               |
| programs        | events by number, memory, traffic                                             |
| specs           | distinct ShardSpecs of parameters                                             |

Nothing is kept if strategies of other packages are installed, since the digest does not cover their code.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from meshwright.compute.parameters.role import Role, StepRule
from meshwright.compute.parameters.shard import Initial, Shard, ShardSpec
from meshwright.config.registry import is_own
from meshwright.planner.plan.memory import Parameter
from meshwright.planner.plan.recorder import HostCopy, Kernel, KernelKind, Program, Start, WaitFor
from meshwright.planner.plan.recordings import Recording
from meshwright.planner.plan.software import Software
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.foreign import open_plain, parse_json
from meshwright.ranks.ledger import Traffic
from meshwright.ranks.mailbox import TensorMeta
from meshwright.strategies.pipeline.task import TaskKind

MOST_FILES = 24
"""The number of files kept; beyond this, the least recently written files are removed."""

MOST_BYTES = 2**30
"""Bytes of a file's JSON; a longer file is not read."""

_FORM = "meshwright recordings 1"
_EVENTS = {"kernel": Kernel, "start": Start, "copy": HostCopy, "wait": WaitFor}
_ROWS: dict[str, tuple[type | tuple[type, ...], ...]] = {
    "kernel": (str, float, int, int, str, float, int, int, str),
    "start": (int, str, str, int, (int, type(None)), int),
    "copy": (int, bool, int, int),
    "wait": (int,),
}
"""The types of the fields of each kind of event."""

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@cache
def code_digest() -> str:
    """Return a digest of this package's source files."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass
class KeptRecordings:
    """Reads and writes recordings in a folder. `files`: lines by key, for each file by its first line."""

    folder: Path
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    found: int = 0
    """The number of recordings read from disk."""
    _changed: set[str] = field(default_factory=set)
    _whose: dict[tuple[int, ...], tuple[Sequence[object], str]] = field(default_factory=dict)

    @classmethod
    def here(cls) -> KeptRecordings | None:
        """Return the recordings of the cache folder; None if strategies of other packages are installed."""
        return cls(cache_folder() / "recordings") if is_own() else None

    def find(self, whose: Sequence[object], key: str) -> Recording | None:
        """Return the recording of a key, or None. `whose`: the kind of device, the software, the model and its data."""
        line = self.files[self._about(whose)].get(key)
        if line is None:
            return None
        try:
            recording = decoded(parse_json(line))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):  # of another form
            return None
        self.found += 1
        return recording

    def keep(self, whose: Sequence[object], key: str, recording: Recording) -> None:
        """Keep a recording that `find` did not find."""
        about = self._about(whose)
        self.files[about][key] = json.dumps(encoded(recording), separators=(",", ":"))
        self._changed.add(about)

    def save(self) -> None:
        """Write the files with new recordings. If the folder cannot be written, nothing happens."""
        for about in self._changed:
            # Another process may have written recordings since: both are merged.
            body = "\n".join(
                f"{key} {line}" for key, line in {**self._read(about), **self.files[about]}.items()
            ).encode()
            packed = zlib.compress(body, 1)
            head = f"{_FORM} {hashlib.sha256(packed).hexdigest()} {about!r}\n".encode()
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self._path(about)
                beside = path.with_suffix(f".{os.getpid()}")
                beside.write_bytes(head + packed)
                beside.replace(path)  # a reader sees the old file or the new one
                files = sorted(self.folder.glob("*.recordings"), key=lambda each: each.stat().st_mtime)
                for old in files[:-MOST_FILES]:
                    old.unlink()
        self._changed.clear()

    def _about(self, whose: Sequence[object]) -> str:
        """Return the words of the first line. The file with this line is read once."""
        # Sections that a search does not vary are identical objects: converting these to text takes longest, so ids are
        # cached.
        known = self._whose.get(ids := tuple(map(id, whose)))
        if known is None:
            device_type, software, *sections = whose
            assert isinstance(software, Software)
            # The order of a set differs between processes.
            facts = {name: sorted(x) if isinstance(x, frozenset) else x for name, x in software}
            about = f"{torch.__version__} {code_digest()} {device_type} {facts} {sections}"
            known = self._whose[ids] = whose, about
            if about not in self.files:
                self.files[about] = self._read(about)
        return known[1]

    def _read(self, about: str) -> dict[str, str]:
        try:
            with open_plain(self._path(about)) as file:
                head, _, packed = file.read().partition(b"\n")
            if head.decode() != f"{_FORM} {hashlib.sha256(packed).hexdigest()} {about!r}":
                return {}
            unpacked = zlib.decompressobj()
            body = unpacked.decompress(packed, MOST_BYTES)
            return dict(line.split(" ", 1) for line in body.decode().splitlines()) if unpacked.eof else {}
        except (OSError, ValueError, zlib.error):
            return {}

    def _path(self, about: str) -> Path:
        return self.folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.recordings"


def encoded(recording: Recording) -> dict[str, Any]:
    """Return the recording as JSON values."""
    events: dict[Any, int] = {}
    specs: dict[int, tuple[int, ShardSpec]] = {}
    numbers: dict[int, int] = {}
    programs: list[Program] = []
    for program in (each for passes in recording.programs.values() for each in passes):
        if id(program) not in numbers:
            numbers[id(program)] = len(programs)
            programs.append(program)
    for each in recording.parameters:
        specs.setdefault(id(each.spec), (len(specs), each.spec))

    def traffic(sent: Traffic) -> list[Any]:
        return [
            sent.calls,
            sent.sent_bytes,
            [[peer, traffic(peer_traffic)] for peer, peer_traffic in sent.by_peer.items()],
        ]

    rows = [
        [
            [events.setdefault(event, len(events)) for event in program.events], program.kept_bytes,
            program.peak_bytes, [[*key, traffic(sent)] for key, sent in program.traffic.items()], program.leads,
            [value for change in program.memory for value in change],
        ]
        for program in programs
    ]  # fmt: skip
    names = {event_class: name for name, event_class in _EVENTS.items()}
    return {
        "events": [[names[type(event)], *event] for event in events],
        "programs": rows,
        "places": {task: [numbers[id(each)] for each in passes] for task, passes in recording.programs.items()},
        "specs": [
            [
                spec.shape, {axis: [shard.dim, shard.copies] for axis, shard in spec.placements.items()},
                spec.initial and [spec.initial.std, spec.initial.mean, spec.initial.uniform],
                [spec.role.name, spec.role.rule.by, spec.role.rule.decays, spec.role.stored],
                spec.tied, spec.owner, spec.partial_over,
            ]
            for _, spec in specs.values()
        ],
        "parameters": [
            [
                each.name, each.shape, str(each.dtype), specs[id(each.spec)][0], each.comes_with_b, each.read_back,
                each.parts, each.parts_back, each.chunks,
            ]
            for each in recording.parameters
        ],
        "outgoing": [[form.shape, str(form.dtype)] for form in recording.outgoing],
        "numbers": [
            recording.output_bytes, recording.holds_input, recording.kept_input_bytes, recording.kept_gradient_bytes,
        ],
        "leaving": {task: [sorted(each) for each in passes] for task, passes in recording.leaving.items()},
    }  # fmt: skip


def decoded(tree: Any) -> Recording:
    """Return the recording of an `encoded` tree. Raises ValueError, TypeError, KeyError, IndexError or AttributeError
    for a tree of another form."""

    def whole(value: Any) -> Any:
        """Convert lists of numbers and words to tuples."""
        if isinstance(value, list):
            return tuple(map(whole, value))
        if not isinstance(value, int | str):
            raise ValueError(f"{value!r} is no number and no word")
        return value

    def event(row: Any) -> Any:
        name, *fields = row
        if not all(map(isinstance, fields, _ROWS[name])) or len(fields) != len(_ROWS[name]):
            raise ValueError(f"{row} is no {name}")
        if name == "kernel" and fields[0] not in get_args(KernelKind):
            raise ValueError(f"{fields[0]} is no kind of kernel")
        return _EVENTS[name](*fields)

    def traffic(row: Any) -> Traffic:
        calls, sent_bytes, peers = row
        made = Traffic(int(calls), int(sent_bytes))
        for peer, peer_row in peers:
            made.by_peer[int(peer)] = traffic(peer_row)
        return made

    def spec(row: Any) -> ShardSpec:
        shape, placements, initial, (role, by, decays, stored), tied, owner, partial_over = row
        return ShardSpec(
            whole(shape), {axis: Shard(int(dim), int(copies)) for axis, (dim, copies) in placements.items()},
            initial and Initial(*initial), Role(role, StepRule(by, bool(decays)), stored), bool(tied),
            None if owner is None else whole(owner), whole(partial_over),
        )  # fmt: skip

    events, specs = [event(row) for row in tree["events"]], [spec(row) for row in tree["specs"]]
    programs = [
        Program(
            tuple([events[index] for index in numbers]), int(kept_bytes), int(peak),
            {(str(axes), str(verb)): traffic(sent) for axes, verb, sent in moved}, int(leads),
            tuple(zip(memory[::2], memory[1::2], strict=True)),
        )
        for numbers, kept_bytes, peak, moved, leads, memory in tree["programs"]
    ]  # fmt: skip
    if not all(isinstance(value, int) for program in programs for change in program.memory for value in change):
        raise ValueError("memory is no list of numbers")
    output_bytes, holds_input, kept_input, kept_gradient = tree["numbers"]
    return Recording(
        {TaskKind(task): tuple(programs[index] for index in rows) for task, rows in tree["places"].items()},
        tuple(
            Parameter(
                str(name), whole(shape), _DTYPES[dtype], specs[index], bool(with_b), bool(back), whole(parts),
                whole(parts_back), whole(chunks),
            )
            for name, shape, dtype, index, with_b, back, parts, parts_back, chunks in tree["parameters"]
        ),
        tuple(TensorMeta(whole(shape), _DTYPES[dtype]) for shape, dtype in tree["outgoing"]),
        int(output_bytes), bool(holds_input), int(kept_input), int(kept_gradient),
        {TaskKind(task): tuple(frozenset(map(int, each)) for each in rows) for task, rows in tree["leaving"].items()},
    )  # fmt: skip
