"""The server that forks the ranks of launched runs for a process of tests, with all modules that ranks import.

multiprocessing has one server a process, which imports the modules named at the server's start. If a test of the
launcher, with ranks that need no torch, started the server, each rank of every later test imported torch and the
package: one to three seconds of a processor, a rank.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.forkserver import ensure_running

from meshwright.parity.register import SHARED
from meshwright.ranks.environment import server_variables
from meshwright.ranks.launch.session import make_fork_server_folder

RUN = (
    "torch._dynamo",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "matplotlib.ticker",
    "meshwright.ranks.launch.preload",
    "meshwright.training.worker",
    "meshwright.tools.verify.job",
    "meshwright.training.measured_run",
    "meshwright.strategies.data_parallel.gathering",
    "meshwright.strategies.data_parallel.parameter_server",
    "meshwright.families.gpt.model",
    "meshwright.families.llama.model",
    "meshwright.strategies.optim.updates",
    "meshwright.compute.tensor.megatron",
    "tests.workers",
    "tests.fuzz.check",
    *SHARED,
)
"""Modules that ranks of most tests run."""


def start_server() -> None:
    """Start the server as the launcher does, unless the server already runs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(RUN))
    with server_variables(make_fork_server_folder(), sys.path):
        ensure_running()
