"""A check's process: calls its function on one rank.

The launcher imports this module once, in the process that it forks ranks from. torch's optimizers import its compiler
when the first is made, for seconds; imported here, that is paid once, and not by every rank of every check.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo

from meshwright.errors import ParityError
from meshwright.launch import Rank
from meshwright.parity.check import load_checks
from meshwright.parity.job import ParityJob
from meshwright.ranks.mesh import Mesh

CASTS = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "own": None}
"""The reference is cast to these; own: nothing is cast."""


def check_rank(rank: Rank, file: Path, name: str, precision: str, out: Path) -> None:
    """A check's process: the function `name` of a file."""
    call_check(vars(load_checks(file, importing=True))[name], rank.mesh, precision, out)


def call_check(function: Callable[[ParityJob], None], mesh: Mesh, precision: str, folder: Path) -> None:
    """Call a check's function on one rank, in the precision that parameters are then made in."""
    before, dtype = torch.get_default_dtype(), CASTS[precision]
    # Models are made inside of the check: so their parameters are born in its precision, and not rounded twice.
    torch.set_default_dtype(dtype or before)
    torch.manual_seed(1)
    try:
        job = ParityJob(mesh, dtype, folder)
        function(job)
    finally:
        torch.set_default_dtype(before)
    # Silence would pass as equality.
    if not job.compared:
        raise ParityError(f"{function.__name__} ended without job.parallel(): there is nothing to compare")
