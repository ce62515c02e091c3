"""A check's process: calls the check's function on one rank.

The launcher imports this module once, in the process that forks the ranks. The first torch optimizer imports torch's
compiler, which takes seconds. The import here takes this time once, not in every rank of every check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from meshwright.parity.cases import case_of
from meshwright.parity.check import MARKED, load_checks, name_of
from meshwright.parity.job import ParityJob, Place
from meshwright.ranks.dtensor import process_group
from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import ParityError
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch.signals import StopRequest

CASTS = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "own": None}
"""The dtypes to which the reference is cast; own: no cast."""


PATIENCE_SECONDS = 120.0
"""The timeout of collectives: models of checks are small, so a longer wait means that a rank has failed."""


@dataclass
class GridPlace:
    """A rank's place in a grid."""

    rank: int
    grid: Grid


def check_rank(
    environment: Environment, stop: StopRequest, *, file: str, name: str, mark_index: int, case: int,
    axes: Sequence[Any], precision: str, out: str,
) -> None:  # fmt: skip
    """Run a check's process.

    Args:
        environment: gives the rank.
        stop: unused; every worker of the launcher has it.
        file: the file of checks.
        name: the check's name, for messages.
        mark_index: index of the function among the functions that the file's import marks.
        case: index of the case of parameters.
        axes: names and sizes of the grid's axes.
        precision: the precision of the check.
        out: the folder of records.
    """
    position = GridPlace(environment.rank, Grid(tuple((axis, size) for axis, size in axes)))
    marked = vars(load_checks(Path(file), importing=True)).get(MARKED, [])
    if mark_index >= len(marked):
        raise ParityError(
            f"the import of {file} does not make the check {name}: make it on a line of the file that its import runs, "
            "in no function that is called later and not behind the main guard"
        )
    function = marked[mark_index]
    given = case_of(function, mark_index, case)
    with process_group(PATIENCE_SECONDS):
        call_check(partial(function, **given) if given else function, position, precision, Path(out))


def call_check(function: Callable[[ParityJob], None], mesh: Place, precision: str, folder: Path) -> None:
    """Call a check's function on one rank, with the precision as torch's default dtype."""
    before, dtype = torch.get_default_dtype(), CASTS[precision]
    # Models are made inside of the check, so parameters are created in the precision, not rounded twice.
    torch.set_default_dtype(dtype or before)
    torch.manual_seed(1)
    try:
        job = ParityJob(mesh, dtype, folder)
        function(job)
    finally:
        torch.set_default_dtype(before)
    # A check without a comparison must not pass.
    if not job.compared:
        raise ParityError(f"{name_of(function)} ended without job.parallel(): there is nothing to compare")
