"""`mw.parity`: prove that any parallel training program computes the same as one process.

    @parity.check(ranks=2)
    def ddp(job):
        job.reference(build_model(), loss=loss_of, batch=batch_of)
        job.parallel(DistributedDataParallel(job.copy()), batch=job.rows("data"))

    check.py, cases.py  @check and parametrize; starts the ranks; the result
    worker.py, job.py   a check on a rank: the job that the function receives; writes records
    batches.py, reference.py             the run on one process, and the tolerances derived from it
    program.py, trace.py                 steps of the parallel program; modules' outputs and gradients, by hooks
    policy.py                            FSDP2's mixed precision on one process
    parts.py, locate.py, explain.py      a local tensor as a part, a copy or a term of the reference's tensor
    judge.py, kinds.py, terms.py         the first mistake: the rules, in the order of cause and effect
    forward.py, gradients.py, later.py, leaks.py    the place and the kind of the mistake
    recorder.py, sampling.py             records of a running training script, in a folder
    norm.py, norm_sums.py, norm_rules.py the norm for clipping in any loop, without a reference
    adapters.py, exports.py, probes.py   adapters' gradients, copies and export, without a reference
    states.py                            packed documents that see each other, without a reference
    recorded.py, runs.py                 two record folders, by the same comparison
    register.py, registered.py           the plans in a library's models, one check each
    command.py, report.py, plugin.py     the command line; a table, JSON, a page; pytest

The package does not depend on Meshwright's models, kits and configs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.parity.check import ParityCheck as Check
from meshwright.parity.check import ParityResult, collect, run_check
from meshwright.parity.check import parity_check as check

if TYPE_CHECKING:
    from meshwright.parity.adapters import adapter_probe
    from meshwright.parity.job import ParityJob as Job
    from meshwright.parity.norm import norm_probe
    from meshwright.parity.policy import cast_like
    from meshwright.parity.recorder import recording
    from meshwright.parity.states import state_probe

__all__ = [
    "Check", "Job", "ParityResult", "adapter_probe", "cast_like", "check", "collect", "norm_probe", "recording",
    "run_check", "state_probe",
]  # fmt: skip

# Imported lazily: these need torch, which pytest must not import for files without checks.
_LATE = {
    "Job": ("meshwright.parity.job", "ParityJob"),
    "adapter_probe": ("meshwright.parity.adapters", "adapter_probe"),
    "cast_like": ("meshwright.parity.policy", "cast_like"),
    "norm_probe": ("meshwright.parity.norm", "norm_probe"),
    "recording": ("meshwright.parity.recorder", "recording"),
    "state_probe": ("meshwright.parity.states", "state_probe"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module, attribute = _LATE[name]
    return getattr(importlib.import_module(module), attribute)
