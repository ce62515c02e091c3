"""Records of ranks, and one message on a job in which a rank has waited too long for another.

The message blames awaited ranks that wait for no other rank. Such ranks compute, are stopped, have ended, or never
started. If every rank waits, ranks have begun different collectives under one number, or wait in a circle.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.ranks.errors import DataError
from meshwright.ranks.flight_recorder import CONNECT, DEVICE, Waiting, Whereabouts
from meshwright.ranks.foreign import read_json, write_fresh

State = Literal["running", "hung", "ended"]


@dataclass(frozen=True)
class Record:
    """A rank's record. `seconds`: time of writing, by the host's monotonic clock; `time`: by the time of day.

    `limit_seconds`: the rank's timeout. A rank that gave up adds `stacks` (by thread name) and `stopped`: the ranks of
    the same host that a signal has stopped.
    """

    rank: int
    world_size: int
    attempt: int
    host: str
    pid: int
    state: State
    seconds: float
    time: float
    where: Whereabouts
    limit_seconds: float = 0.0
    stacks: dict[str, str] = field(default_factory=dict)
    stopped: list[int] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Replace the rank's record atomically: readers get the old record or the new one."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"rank-{self.rank}.partial"
        write_fresh(partial, json.dumps(asdict(self)))
        # A rename is atomic on one file system, so that no reader gets half a record.
        partial.rename(partial.with_suffix(".json"))

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            tree: dict[str, Any] = read_json(path)
            return cls(**{**tree, "where": Whereabouts.from_json(tree["where"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no record of a rank ({error!r:.80}): move the file aside") from error


def read_records(folder: Path, attempt: int | None = None) -> list[Record]:
    """Read the records of an attempt in rank order; by default of the newest attempt with records."""
    records = []
    for path in folder.glob("rank-*.json"):
        with suppress(FileNotFoundError):  # a new run has cleared the folder
            records.append(Record.read(path))
    chosen = max((record.attempt for record in records), default=0) if attempt is None else attempt
    return sorted((record for record in records if record.attempt == chosen), key=lambda record: record.rank)


def process_state(pid: int) -> str:
    """Return Linux's letter for a process's state; empty if there is no such process, or no Linux.

    R runs, S sleeps, T and t are stopped by SIGSTOP or a debugger, Z has ended and was not reaped.
    """
    try:
        # The process's name precedes the state, in brackets, and may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def clear_records(folder: Path) -> None:
    """Remove the records and marks of an earlier job."""
    for path in (*folder.glob("rank-*.json"), *folder.glob("rank-*.partial"), *folder.glob("hung-*")):
        path.unlink(missing_ok=True)


_FAILED_TO = {
    CONNECT: "did not connect",
    "receive": "sent nothing",
    "send": "received nothing",
    "exchange": "exchanged nothing",
    DEVICE: "gives the devices of others nothing to go on with,",
}
"""The late rank's failure, by the verb of the rank that waits; all other verbs are collectives."""

MOST_LINES = 16
"""Largest number of ranks named in a message, so that a message about a thousand ranks is readable."""


def names_of(ranks: Sequence[Any], text: Callable[[Any], str] = str) -> str:
    """List the first MOST_LINES ranks or hosts by name: 0, 1, 2, ..."""
    return ", ".join(map(text, ranks[:MOST_LINES])) + (", ..." if len(ranks) > MOST_LINES else "")


def absent(missing: Collection[int], world_size: int, seconds: float) -> str:
    """Write the message on ranks that are missing at the start of the job."""
    came = f"{world_size - len(missing)} of {world_size} ranks came to the start within {seconds:g} s (timeout.join)"
    return f"{came}; missing: rank {names_of(sorted(missing))}"


def explain_hang(records: Sequence[Record]) -> str | None:
    """Write the message on a job in which a rank has given up; None if no rank has."""
    hung = [record for record in records if record.state == "hung"]
    if not hung:
        return None
    known = {record.rank: record for record in records}
    missed: defaultdict[int, list[Record]] = defaultdict(list)
    """By awaited rank: the records of ranks with a longest wait for that rank."""
    for record in hung:
        # Only the longest wait, which delays the rank.
        for wait in record.where.waiting[:1]:
            for rank in wait.ranks:
                if rank != record.rank and not _has_come(known.get(rank), wait):
                    missed[rank].append(record)
    # An awaited rank that waits is delayed by another rank, and is not the cause.
    held_up = {record.rank for record in hung if record.where.waiting}
    causes = [rank for rank in sorted(missed) if rank not in held_up]
    # If all ranks wait for devices, no rank can be blamed: hosts cannot observe kernels.
    on_devices = all(wait.verb == DEVICE for record in hung for wait in record.where.waiting[:1])
    blamed = causes or ([] if on_devices else sorted(missed))
    # Only if all ranks wait: a rank that computes or is gone explains a hang.
    parted = "" if causes else _parted(hung)
    if on_devices and not causes:
        parted = "all hosts wait for their devices, in which a kernel does not end: between them nothing is carried"
    lines = [parted] if parted else [_accusation(rank, missed[rank], known) for rank in blamed]
    limit = max(record.limit_seconds for record in hung)
    late = f"a wait took {limit:g} s; when the ranks left their records, all had come to what the others waited for"
    hosts = sorted({record.host for record in hung})
    if len(hosts) > 1:
        late += f": the network between {names_of(hosts)} carries nothing, or was too slow"
    why = f" (timeout: {limit:g} s)" if limit else ""
    first = f"no progress: {lines[0]}{why}" if lines else late
    # Blamed ranks first, since only the first MOST_LINES are printed.
    others = [record.rank for record in hung if record.rank not in blamed]
    details = [f"  {_where(rank, known.get(rank), hung)}" for rank in [*blamed, *others]]
    left_out = [f"  and {len(details) - MOST_LINES} more ranks"] if len(details) > MOST_LINES else []
    stack = [
        f"  rank {rank} stands at:\n{known[rank].stacks['MainThread']}"
        for rank in blamed[:1] or others[:1]
        if rank in known and "MainThread" in known[rank].stacks
    ]
    return "\n".join([first, *lines[1:], *details[:MOST_LINES], *left_out, *stack])


def _has_come(record: Record | None, wait: Waiting) -> bool:
    """Return whether a rank has begun the collective awaited by another rank. False for messages (number 0)."""
    if record is None or not wait.number:
        return False
    begun = record.where.begun.get(wait.axis, ())
    # Only the last REMEMBERED collectives are recorded; an older one has been begun.
    forgotten = bool(begun) and wait.number < min(ordinal for ordinal, _, _ in begun)
    return forgotten or (wait.number, wait.verb, wait.payload_bytes) in begun


def _parted(hung: Sequence[Record]) -> str:
    """Write a sentence on the first number under which ranks have begun different collectives; empty if none."""
    for record, wait in ((waiter, wait) for waiter in hung for wait in waiter.where.waiting[:1]):
        for peer in hung:
            for ordinal, verb, size in peer.where.begun.get(wait.axis, ()):
                same = (verb, size) == (wait.verb, wait.payload_bytes)
                if peer.rank in wait.ranks and ordinal == wait.number and not same:
                    theirs = Waiting(wait.axis, verb, size, (), ordinal, 0.0)
                    return f"rank {record.rank} is in {wait}, and rank {peer.rank} in {theirs}: they have parted"
    return ""


def _accusation(rank: int, waiting: Sequence[Record], known: dict[int, Record]) -> str:
    """Write a line on an awaited rank and the waiting ranks."""
    host = f" ({known[rank].host})" if rank in known else ""
    wait = max((record.where.waiting[0] for record in waiting), key=lambda wait: wait.seconds)
    failed = f"{_FAILED_TO[wait.verb]} on axis {wait.axis}" if wait.verb in _FAILED_TO else f"did not come to {wait}"
    who = ", ".join(str(record.rank) for record in waiting[:MOST_LINES])
    who = f"rank {who} waits" if len(waiting) == 1 else f"ranks {who} wait"
    return f"rank {rank}{host} {failed}; {who}{_since(wait)}"


def _where(rank: int, record: Record | None, hung: Sequence[Record]) -> str:
    """Write a line on one rank's current or last known activity."""
    if record is None:
        return f"rank {rank} has left no record: it never started, or its host cannot write to the status folder"
    name = f"rank {rank} ({record.host}, process {record.pid})"
    if record.state == "ended":
        return f"{name} has ended; it was last in {record.where}"
    if record.state == "running":
        stopped = any(rank in waiter.stopped for waiter in hung)
        state = "; its process was stopped (SIGSTOP)" if stopped else ""
        # Monotonic clocks compare on one host only, so the age of another host's record is unknown.
        ages = [waiter.seconds - record.seconds for waiter in hung if waiter.host == record.host]
        age = f"was last heard of {max(ages):.0f} s ago" if ages else "gave no answer; it was last heard of"
        return f"{name} {age} in {record.where}{state}"
    if not record.where.waiting:
        return f"{name} waits for nobody, in {record.where}"
    wait = record.where.waiting[0]
    return f"{name} waits in {wait}{_since(wait)}, in {record.where}"


def _since(wait: Waiting) -> str:
    """Write a wait's seconds; empty below one second, since ranks that are threads detect a deadlock at once."""
    return f" for {wait.seconds:.0f} s" if wait.seconds >= 1 else ""
