"""`meshwright diff RUN RUN`: finds the first step, parameter and box with different bits in two runs.

The runs' metrics.jsonl files are compared for the first step with another loss, norm or root. Then the checkpoints of
equal steps that both runs still have are compared: every byte is read, checked against the recorded digest, and
compared. Layouts do not matter, since checkpoints are read as boxes of whole tensors. With `roots`, only the recorded
hashes are compared and no shard is read.

| outcome | exit code |
|---|---|
| equal to the bit, or equal by their roots | 0 |
| a step or a checkpoint differs, or a checkpoint is damaged | 1 |
| nothing differs in losses and norms, and no common checkpoint (with `roots`: no common root) says more | 3 |
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from meshwright.compute.parameters.root import comparable
from meshwright.output import terminal
from meshwright.output.tables import print_table
from meshwright.ranks.errors import DataError, MismatchError, UndecidedError
from meshwright.ranks.foreign import plain_folder
from meshwright.tools.differing import Compared, Damage, Part, by_bytes, by_roots
from meshwright.training.checkpoint.reader import steps_in
from meshwright.training.folder import CHECKPOINTS, OF_TRACKERS
from meshwright.training.follow import METRICS, read_history

NUMBERS = ("loss", "grad_norm", "root")
"""The numbers of a step that depend only on the computation, not on time or memory."""
MOST_SHOWN = 12


@dataclass(frozen=True)
class Difference:
    """Result of comparing two runs."""

    runs: tuple[str, str]
    steps: int
    """The number of steps that both runs have."""
    looked: dict[str, int]
    """For each name of NUMBERS, the number of steps in which that number was compared."""
    step: int | None
    """The first step that differs; None if none does."""
    numbers: dict[str, tuple[Any, Any]]
    """The numbers that differ in `step`, with each run's value."""
    checkpoints: tuple[int, ...]
    """The steps with a checkpoint in both runs."""
    by_roots: bool
    """Whether recorded roots alone were compared."""
    compared: tuple[int, ...] = ()
    """The steps of the compared checkpoints, up to the first that differs or is damaged."""
    tensors: int = 0
    bytes: int = 0
    """Tensors and bytes that were read from the compared checkpoints."""
    checkpoint: int | None = None
    """The step of the first checkpoint that differs; `parts` are the differences."""
    parts: tuple[Part, ...] = ()
    damages: tuple[Damage, ...] = ()
    """Places in the compared checkpoints with other bytes than were written."""
    undecided: str = ""
    """The reason why runs without a difference are not proven equal; empty if the runs are."""

    @property
    def equal(self) -> bool | None:
        """Whether the runs are equal; None if nothing differs but equality is not proven."""
        if self.step is not None or self.checkpoint is not None or self.damages:
            return False
        return None if self.undecided else True

    def check(self) -> None:
        """Raise MismatchError if the runs differ or are damaged, UndecidedError if equality is not proven."""
        if self.damages:
            more = f" (and {len(self.damages) - 1} more)" if len(self.damages) > 1 else ""
            raise MismatchError(f"{self.damages[0]}{more}")
        if self.step is not None:
            raise MismatchError(f"the runs part in step {self.step}: another {' and '.join(self.numbers)}")
        if self.checkpoint is not None:
            raise MismatchError(f"the runs part at the checkpoint of step {self.checkpoint}: {self.parts[0].tensor}")
        if self.undecided:
            raise UndecidedError(f"not shown to be equal: {self.undecided}")


def difference(first_run: Path, second_run: Path, *, roots: bool = False) -> Difference:
    """Compare two runs' folders. `roots`: compare checkpoints by recorded roots, without reading a shard.

    Raises DataError if the runs have no step in common.
    """
    for run in (first_run, second_run):
        plain_folder(run, OF_TRACKERS)
    histories = [{line["step"]: line for line in read_history(run / METRICS)} for run in (first_run, second_run)]
    common = sorted(histories[0].keys() & histories[1].keys())
    if not common:
        raise DataError(f"{first_run} and {second_run} have no step in common")
    step, numbers, looked = None, dict[str, tuple[Any, Any]](), dict.fromkeys(NUMBERS, 0)
    # Only the first difference is reported: later ones follow from the first.
    for step_now in common:
        both = [lines[step_now] for lines in histories]
        known = [key for key in NUMBERS if None not in (both[0].get(key), both[1].get(key))]
        if not comparable(*(line.get("root") for line in both)):
            known = [key for key in known if key != "root"]
        looked |= {key: looked[key] + 1 for key in known}
        numbers = {key: (both[0][key], both[1][key]) for key in known if repr(both[0][key]) != repr(both[1][key])}
        if numbers:
            step = step_now
            break
    folders = [dict(steps_in(run / CHECKPOINTS)) for run in (first_run, second_run)]
    shared = tuple(sorted(folders[0].keys() & folders[1].keys()))
    found: dict[int, Compared] = {}
    for at in shared:
        found[at] = (by_roots if roots else by_bytes)(folders[0][at], folders[1][at])
        if found[at].parts or found[at].damages:
            break
    parted = next((at for at in found if found[at].parts), None)
    return Difference(
        (str(first_run), str(second_run)), len(common), looked, step, numbers, shared, roots,
        compared=tuple(found),
        tensors=sum(each.tensors for each in found.values()),
        bytes=sum(each.bytes for each in found.values()),
        checkpoint=parted,
        parts=() if parted is None else found[parted].parts,
        damages=tuple(damage for each in found.values() for damage in each.damages),
        undecided=_undecided(found, looked, (first_run, second_run), folders, roots=roots),
    )  # fmt: skip


def _undecided(
    found: dict[int, Compared],
    looked: dict[str, int],
    runs: tuple[Path, Path],
    folders: list[dict[int, Path]],
    *,
    roots: bool,
) -> str:
    """Return the reason why the comparisons do not prove two runs equal; empty if the comparisons do."""
    texts = [each.undecided for each in found.values() if each.undecided]
    if texts:
        return texts[0]
    if found or (roots and looked["root"]):
        return ""
    held = ", ".join(f"{run} has {_steps(folder)}" for run, folder in zip(runs, folders, strict=True))
    return f"{_looked(looked)} agree, and the runs have no checkpoint in common ({held})"


def _steps(steps: Any) -> str:
    return ", ".join(f"step {step}" for step in sorted(steps)) or "none"


def _looked(looked: dict[str, int]) -> str:
    """Name the compared numbers: `losses and norms of 4 steps, roots of 2`."""
    counts: dict[int, list[str]] = {}
    for key, name in zip(NUMBERS, ("losses", "norms", "roots"), strict=True):
        if looked[key]:
            counts.setdefault(looked[key], []).append(name)
    texts = [" and ".join(names) + f" of {count}" for count, names in counts.items()]
    steps = "step" if max(counts, default=0) == 1 else "steps"
    return ", ".join([f"{texts[0]} {steps}", *texts[1:]])


def as_dict(found: Difference) -> dict[str, Any]:
    return {"equal": found.equal, **asdict(found)}


def render(found: Difference) -> None:
    """Print that two runs are equal, or the first difference; and the numbers that were compared."""
    console = terminal.console()
    looked = _looked(found.looked)
    if found.equal:
        compared = f"{found.steps} steps and the checkpoints that both have ({_steps(found.checkpoints)}); {looked}"
        read = (
            f"all {found.tensors} tensors were read, {found.bytes / 2**20:,.1f} MiB, and are what their writers wrote"
        )
        roots = f"equal by their roots, nothing was read: {compared}"
        console.print(roots if found.by_roots else f"equal to the bit: {compared}; {read}", soft_wrap=True)
        return
    if found.step is None:
        console.print(f"nothing differs in the {looked}")
    if found.step is not None:
        table = Table(f"step {found.step}", *found.runs, title="the first step that differs")
        for key, values in found.numbers.items():
            table.add_row(key, *map(repr, values))
        print_table(console, table)
    for damage in found.damages[:MOST_SHOWN]:
        console.print(str(damage), soft_wrap=True)
    if len(found.damages) > MOST_SHOWN:
        console.print(f"... and {len(found.damages) - MOST_SHOWN} damaged places more (--json lists all)")
    if found.checkpoint is not None:
        title = f"checkpoint of step {found.checkpoint}"
        table = Table("tensor", "elements that differ", "the box around them", title=title)
        for mismatch in found.parts[:MOST_SHOWN]:
            box = ", ".join(f"{a}..{b}" for a, b in zip(mismatch.first, mismatch.last, strict=True))
            table.add_row(mismatch.tensor, f"{mismatch.differing:,} of {mismatch.elements:,}", f"[{box}]")
        print_table(console, table)
        if len(found.parts) > MOST_SHOWN:
            console.print(f"... and {len(found.parts) - MOST_SHOWN} tensors more (--json lists all)")
    elif not found.damages:
        said = "no recorded root differs (nothing was read)" if found.by_roots else "no tensor differs"
        console.print(f"{said} in the checkpoints that both have: {_steps(found.checkpoints)}")
