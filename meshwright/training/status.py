"""`meshwright train --status OUT`: where each rank of a run is, from the records that it leaves while it lives.

Whether a run lives is seen by whether its records are renewed: that needs no process to ask, and works from any host
that sees the run's folder, whatever its clock says.
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
"""The folder in a run's in which its ranks leave where they are."""

LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 4.0
"""A rank that lives leaves several records in this time."""

LONG_SECONDS = 5.0
"""A wait of which somebody who asks for the status wants to know the cause."""


@dataclass(frozen=True)
class RunStatus:
    """`renewed`: the ranks that have left a new record while we looked. `waits`: who keeps whom waiting, if anybody."""

    state: Literal["alive", "hung", "ended", "dead", "none"]
    out: Path
    records: tuple[Record, ...]
    renewed: frozenset[int]
    waits: str | None
    steps: int | None = None
    """The run's number of steps; None where its folder does not say it."""

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
    """Look at a run's records for as long as it takes to see whether it lives: some seconds at most."""
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
        # The message that the ranks would leave if they gave up now.
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
    """The table of ranks, and what there is to say."""
    console = terminal.console()
    console.print(status.summary, soft_wrap=True)
    if status.records:
        table = Table("rank", "host", "process", "step", "phase", "task", "waits in", "for", "last sign of life")
        for record in status.records:
            where = record.where
            wait = where.waiting[0] if where.waiting else None
            # On its own host a record's age is counted by the clock that never jumps.
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
