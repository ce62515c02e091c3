"""`meshwright train --status OUT`: the step and phase of each rank, from records that live ranks write to the folder.

A run is alive if its records are renewed. This test asks no process, does not depend on clocks, and works on any host
with access to the run's folder.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from meshwright.output import terminal
from meshwright.output.tables import print_table
from meshwright.ranks.hang import Record, explain_hang, read_records
from meshwright.training.folder import steps_of

STATUS = "status"
"""Subfolder of a run's folder with the ranks' records."""

LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 4.0
"""A live rank writes several records in this time."""

LONG_SECONDS = 5.0
"""The cause of a longer wait is shown."""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run. `renewed`: ranks with a new record during the look. `waits`: who waits for whom, if known."""

    state: Literal["alive", "hung", "ended", "dead", "none"]
    out: Path
    records: tuple[Record, ...]
    renewed: frozenset[int]
    waits: str | None
    steps: int | None = None
    """The run's number of steps; None if not in the run's folder."""

    @property
    def summary(self) -> str:
        step = max((record.where.step for record in self.records), default=0)
        last = f"{step}" if self.steps is None else f"{step} of {self.steps} ({100 * step // self.steps} %)"
        if self.state == "alive":
            running = [record.rank for record in self.records if record.state == "running"]
            silent = [str(rank) for rank in running if rank not in self.renewed]
            unheard = f"; no sign of life from rank {', '.join(silent)}" if silent else ""
            return f"{self.out}: a run is alive, in step {last}{unheard}"
        if self.state == "none":
            return f"{self.out}: no run is alive here, and none has left a status"
        ends = {"ended": "ended by itself, after", "hung": "gave up waiting in", "dead": "was killed in"}
        return f"{self.out}: no run is alive here; the last one {ends[self.state]} step {last}"


def status_of(out: Path) -> RunStatus:
    """Read a run's records until all running ranks have renewed theirs, at most PATIENCE_SECONDS."""
    before = {record.rank: record for record in read_records(out / STATUS)}
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        records = read_records(out / STATUS)
        running = [record for record in records if record.state == "running"]
        renewed = {
            record.rank
            for record in running
            if (old := before.get(record.rank)) is None or (record.pid, record.seconds) != (old.pid, old.seconds)
        }
        if len(renewed) == len(running) or time.monotonic() > end:
            break
        time.sleep(LOOK_SECONDS)
    waiting = [wait.seconds for record in records if record.rank in renewed for wait in record.where.waiting[:1]]
    waits = None
    if not renewed or max(waiting, default=0.0) >= LONG_SECONDS:
        # The message of ranks that would give up now.
        as_hung = [replace(record, state="hung") if record.rank in renewed else record for record in records]
        waits = explain_hang(as_hung)
    return RunStatus(_state(records, renewed), out, tuple(records), frozenset(renewed), waits, steps_of(out))


def _state(records: Sequence[Record], renewed: set[int]) -> Literal["alive", "hung", "ended", "dead", "none"]:
    states = {record.state for record in records}
    if not records:
        return "none"
    if renewed:
        return "alive"
    if "hung" in states:
        return "hung"
    return "dead" if "running" in states else "ended"


def as_dict(status: RunStatus) -> dict[str, Any]:
    ranks = [asdict(record) | {"renewed": record.rank in status.renewed} for record in status.records]
    return {"state": status.state, "out": str(status.out), "steps": status.steps, "waits": status.waits, "ranks": ranks}


def render(status: RunStatus) -> None:
    """Print the summary, the table of ranks, and the cause of waits."""
    console = terminal.console()
    console.print(status.summary, soft_wrap=True)
    if status.records:
        table = Table("rank", "host", "process", "step", "phase", "task", "waits in", "for", "last sign of life")
        for record in status.records:
            where = record.where
            wait = where.waiting[0] if where.waiting else None
            # On the record's own host the age is measured with the monotonic clock.
            here = record.host == socket.gethostname()
            age = time.monotonic() - record.seconds if here else time.time() - record.time
            table.add_row(
                str(record.rank),
                record.host,
                str(record.pid),
                str(where.step),
                where.phase,
                where.task,
                str(wait or ""),
                f"{wait.seconds:.0f} s" if wait else "",
                "now" if record.rank in status.renewed else f"{age:.0f} s ago, {record.state}",
            )
        print_table(console, table)
    if status.waits:
        console.print(status.waits, soft_wrap=True)
