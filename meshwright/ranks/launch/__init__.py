"""Start a job's ranks on this machine, stop them, and explain in one message why they died.

    run(function, ranks, ...) ── launch(job, ...) ──┬─ forked.py    workers forked from a clean process
                                                    └─ mpiexec.py   mpiexec: `python -m meshwright.ranks.launch FOLDER`
    inside a worker: worker.py runs the job, function.py opens the mesh and calls function(rank, **arguments)

The launcher and the workers share a private folder. job.json holds the job; attempt-K/rank-R.json holds the report of a
failed rank. A file `stop` asks the workers to finish the step and exit. torch is imported only if needed.
"""

from meshwright.ranks.asked import Ranks
from meshwright.ranks.launch.failure import Interrupted
from meshwright.ranks.launch.function import Rank, prepare, run
from meshwright.ranks.launch.launcher import launch
from meshwright.ranks.launch.signals import StopRequest
from meshwright.ranks.launch.worker import Job, joined, run_worker

__all__ = [
    "Interrupted",
    "Job",
    "Rank",
    "Ranks",
    "StopRequest",
    "joined",
    "launch",
    "prepare",
    "run",
    "run_worker",
]
