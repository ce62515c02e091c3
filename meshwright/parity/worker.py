"""A check's process: calls its function on one rank.

The launcher imports this module once, in the process that it forks ranks from. torch's optimizers import its compiler
when the first is made, for seconds; imported here, that is paid once, and not by every rank of every check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._dynamo

from meshwright.errors import ParityError
from meshwright.launch import Rank
from meshwright.parity.check import load_checks
from meshwright.parity.job import CASTS, ParityJob


def check_rank(rank: Rank, file: Path, name: str, precision: str, out: Path) -> None:
    """A check's process: the function `name` of a file."""
    function = vars(load_checks(file))[name]
    call_check(function, rank, rank.mesh.grid.axes, precision, out)


def call_check(
    function: Callable[[ParityJob], None], rank: Rank, axes: Sequence[tuple[str, int]], precision: str, folder: Path
) -> None:
    """Call a check's function on one rank, in the precision that parameters are then made in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(CASTS[precision] or before)
    torch.manual_seed(1)
    try:
        job = ParityJob(rank, axes, precision, folder)
        function(job)
    finally:
        torch.set_default_dtype(before)
    if not job.compared:
        raise ParityError(f"{function.__name__} ended without job.parallel(): there is nothing to compare")
