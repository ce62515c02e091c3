"""Local workers through torch's elastic agent: it starts them, watches them, and restarts them as a group.

On a CPU the workers are forked from this process, which has imported torch but run nothing with it: a rank starts in a
tenth of a second. CUDA does not survive a fork, so there they are spawned. The agent keeps a TCP store on loopback, on
a port that the kernel picked, over all restarts; workers must therefore prefix their keys with the attempt.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.launch.failure import Death, explain, read_reports
from meshwright.launch.worker import run_launched

_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 5
"""Between SIGTERM and SIGKILL for the survivors of a dead rank."""

_AGENT_SIGNAL = "SIGQUIT"
"""The one signal left to the agent's own handler (it must have one); the others belong to StopSignals."""

_CHATTY_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


def run_elastic(
    folder: Path, num_ranks: int, restarts: int, device: Literal["cpu", "cuda"], threads: int
) -> str | None:
    """Run the job in `folder`; the message on why it failed, None where it succeeded."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True, "timeout": 60},
        local_addr="127.0.0.1",
        max_restarts=restarts,
        monitor_interval=_POLL_SECONDS,
        start_method="spawn" if device == "cuda" else "fork",
        signals_to_handle=_AGENT_SIGNAL,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )
    with _quiet():
        try:
            elastic_launch(config, _worker)(str(folder), os.getpid(), threads)
        except ChildFailedError as error:
            rank, failure = next(iter(error.failures.items()))
            return explain(Death(rank, failure.exitcode), read_reports(folder, attempt=restarts))
    return None


def _worker(folder: str, launcher: int, threads: int) -> None:
    torch.set_num_threads(threads)
    run_launched(Path(folder), launcher)


@contextmanager
def _quiet() -> Iterator[None]:
    """No word of the agent's reaches the user, who gets one message from us; its handler goes with it."""
    loggers = [logging.getLogger(name) for name in _CHATTY_LOGGERS]
    before = [(logger.propagate, list(logger.handlers)) for logger in loggers]
    handler = signal.getsignal(signal.SIGQUIT)
    for logger in loggers:
        logger.propagate = False
        logger.handlers = [logging.NullHandler()]
    try:
        with warnings.catch_warnings():
            # Python >= 3.12 warns of any fork beside threads; the only ones here are the store's, which no child uses.
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            yield
    finally:
        signal.signal(signal.SIGQUIT, handler)
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.handlers = handlers
