"""The server that a process of tests forks the ranks of its launched runs from, started with all that they import.

multiprocessing has one server a process, which imports what the first to ask for it names. Where that was a test of
the launcher, whose ranks need no torch, each rank of every later test imported torch and the package for itself: one
to three seconds of a processor, a rank.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.forkserver import ensure_running

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
)
"""Modules that ranks of most tests run."""


def start_server() -> None:
    """Start it as the launcher does, where it does not run yet."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(RUN))
    with server_variables(make_fork_server_folder(), sys.path):
        ensure_running()
