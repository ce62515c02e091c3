"""`meshwright diff RUN RUN`: the first step, parameter and box in which two runs part, to the bit.

Each run's metrics.jsonl says in which step a loss, a norm or a root first differs; of the checkpoints of equal steps
that both still have, the first that differs says which tensors, and where in them. Layouts do not matter: checkpoints
are read by boxes of whole tensors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from meshwright import terminal
from meshwright.checkpoint.reader import Checkpoint, steps_in
from meshwright.errors import DataError, MismatchError
from meshwright.foreign import plain_folder
from meshwright.parameters.shard import Box
from meshwright.training.folder import CHECKPOINTS, OF_TRACKERS
from meshwright.training.follow import METRICS, read_history

NUMBERS = ("loss", "grad_norm", "root")
"""The numbers of a step that depend on the computation alone, not on time or memory."""
MOST_SHOWN = 12


@dataclass(frozen=True)
class Part:
    """A tensor that differs between two checkpoints: the number of its elements that differ, and the box around
    them."""

    tensor: str
    differing: int
    elements: int
    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """Two runs, compared. `steps`: how many both have. `step`: the first that differs, in these `numbers`; None: none.
    `checkpoints`: the steps of which both have one. `checkpoint`: the first that differs, by its `parts`."""

    runs: tuple[str, str]
    steps: int
    step: int | None
    numbers: dict[str, tuple[Any, Any]]
    checkpoints: tuple[int, ...]
    checkpoint: int | None
    parts: tuple[Part, ...]

    @property
    def equal(self) -> bool:
        return self.step is None and self.checkpoint is None

    def check(self) -> None:
        """Raises MismatchError where the runs differ."""
        if self.step is not None:
            raise MismatchError(f"the runs part in step {self.step}: another {' and '.join(self.numbers)}")
        if self.checkpoint is not None:
            raise MismatchError(f"the runs part at the checkpoint of step {self.checkpoint}: {self.parts[0].tensor}")


def difference(one: Path, other: Path) -> Difference:
    """Compare two runs' folders. Raises DataError where they have no step in common."""
    for run in (one, other):
        plain_folder(run, OF_TRACKERS)
    histories = [{line["step"]: line for line in read_history(run / METRICS)} for run in (one, other)]
    common = sorted(histories[0].keys() & histories[1].keys())
    if not common:
        raise DataError(f"{one} and {other} have no step in common")
    step, numbers = None, dict[str, tuple[Any, Any]]()
    # The first difference alone: later ones follow from it.
    for step_now in common:
        both = [lines[step_now] for lines in histories]
        numbers = {
            key: (both[0][key], both[1][key])
            for key in NUMBERS
            if key in both[0] and key in both[1] and repr(both[0][key]) != repr(both[1][key])
        }
        if numbers:
            step = step_now
            break
    folders = [dict(steps_in(run / CHECKPOINTS)) for run in (one, other)]
    shared = tuple(sorted(folders[0].keys() & folders[1].keys()))
    for at in shared:
        if parts := differing_parts(Checkpoint(folders[0][at]), Checkpoint(folders[1][at])):
            return Difference((str(one), str(other)), len(common), step, numbers, shared, at, parts)
    return Difference((str(one), str(other)), len(common), step, numbers, shared, None, ())


def differing_parts(one: Checkpoint, other: Checkpoint) -> tuple[Part, ...]:
    """The tensors that differ between two checkpoints, in the model's order; a tensor of one checkpoint alone differs
    whole. Before them the order of data, if the two continue with other samples."""
    roots = one.manifest.roots, other.manifest.roots
    found = []
    if None not in (a.data for a in roots) and roots[0].data != roots[1].data:
        found.append(Part("the order of data", 1, 1, (), ()))
    # Equal roots say that all tensors are equal, without reading one of them.
    if roots[0].state is not None and roots[0].state == roots[1].state:
        return tuple(found)
    held = {**one.manifest.parts, **other.manifest.parts}
    for parameter, kind in held:
        name, shape = f"{kind} of {parameter}", held[parameter, kind][0].shape
        box = Box((0,) * len(shape), shape)
        if not all((parameter, kind) in side.manifest.parts for side in (one, other)):
            found.append(Part(name, box.num_elements, box.num_elements, box.offsets, tuple(n - 1 for n in shape)))
            continue
        a, b = (side.read(parameter, kind, box) for side in (one, other))
        # Compared as integers: a NaN equals itself, and 0.0 differs from -0.0.
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if a.dtype == b.dtype:
            where = (a.view(words[a.element_size()]) != b.view(words[b.element_size()])).nonzero()
        else:
            where = torch.ones(shape).nonzero()
        if where.numel():
            first, last = where.amin(0).tolist(), where.amax(0).tolist()
            found.append(Part(name, where.shape[0], box.num_elements, tuple(first), tuple(last)))
    return tuple(found)


def as_dict(found: Difference) -> dict[str, Any]:
    return {"equal": found.equal, **asdict(found)}


def render(found: Difference) -> None:
    """Print that two runs are equal, or where they part."""
    console = terminal.console()
    checkpoints = ", ".join(f"step {step}" for step in found.checkpoints) or "none"
    compared = f"{found.steps} steps and the checkpoints that both have ({checkpoints})"
    if found.equal:
        console.print(f"equal to the bit: {compared}")
        return
    if found.step is None:
        console.print(f"losses, norms and roots are equal: {found.steps} steps")
    else:
        table = Table(f"step {found.step}", *found.runs, title="the first step that differs")
        for key, values in found.numbers.items():
            table.add_row(key, *map(repr, values))
        console.print(table)
    if found.checkpoint is None:
        console.print(f"no tensor differs in the checkpoints that both have: {checkpoints}")
        return
    table = Table(
        "tensor", "elements that differ", "the box around them", title=f"checkpoint of step {found.checkpoint}"
    )
    for part in found.parts[:MOST_SHOWN]:
        box = ", ".join(f"{a}..{b}" for a, b in zip(part.first, part.last, strict=True))
        table.add_row(part.tensor, f"{part.differing:,} of {part.elements:,}", f"[{box}]")
    console.print(table)
    if len(found.parts) > MOST_SHOWN:
        console.print(f"... and {len(found.parts) - MOST_SHOWN} tensors more (--json lists all)")
