"""`mw.parity`: the proof that a parallel program computes what one process computes, for anybody's training.

    @parity.check(ranks=2)
    def ddp(job):
        job.reference(build_model(), loss=loss_of, batch=batch_of)
        job.parallel(DistributedDataParallel(job.copy()), batch=job.rows("data"))

    check.py            @check, starting the ranks, the result
    worker.py, job.py   a check on a rank: what its function is given; it writes what the models gave
    reference.py        one process, and the tolerances that are derived from it
    trace.py            modules' outputs and their gradients, by hooks
    parts.py, locate.py, explain.py      what a local tensor is of the reference's
    judge.py, kinds.py, gradients.py     what is wrong first, where, and of which kind
    report.py, plugin.py                 a table, JSON, a page; pytest

It knows nothing of Meshwright's models, kits and configs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.parity.check import ParityCheck as Check
from meshwright.parity.check import ParityResult, collect, run_check
from meshwright.parity.check import parity_check as check

if TYPE_CHECKING:
    from meshwright.parity.job import ParityJob as Job

__all__ = ["Check", "Job", "ParityResult", "check", "collect", "run_check"]


def __getattr__(name: str) -> Any:
    if name != "Job":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return importlib.import_module("meshwright.parity.job").ParityJob
