"""Local workers through torch's elastic agent: it starts them, watches them, and restarts them as a group.

Workers are forked from a clean process that has imported torch and run nothing with it (multiprocessing's fork server):
a rank starts in a tenth of a second, whatever this process has done. Forked from this one, it could hang without a word
in its first parallel operation: OpenMP's threads do not survive a fork. The agent keeps a TCP store on loopback, on a
port that the kernel picked, over all restarts; workers must therefore prefix their keys with the attempt.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.launch.failure import Death, explain, read_reports
from meshwright.launch.job import Job
from meshwright.launch.output import SOCKET, OutputServer, receive_output
from meshwright.launch.tether import die_with_parent
from meshwright.launch.worker import run_launched

_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 5
"""Between SIGTERM and SIGKILL for the survivors of a dead rank."""

_AGENT_SIGNAL = "SIGQUIT"
"""The one signal left to the agent's own handler (it must have one); the others belong to StopSignals."""

_CHATTY_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


def run_elastic(folder: Path, num_ranks: int, restarts: int, threads: int) -> str | None:
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
        start_method="forkserver",
        signals_to_handle=_AGENT_SIGNAL,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )
    module, _, _ = Job.read(folder).entry.partition(":")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["meshwright.launch.preload", module])
    with _quiet(), OutputServer(folder / SOCKET):
        try:
            elastic_launch(config, _worker)(str(folder), threads)
        except ChildFailedError as error:
            rank, failure = next(iter(error.failures.items()))
            return explain(Death(rank, failure.exitcode), read_reports(folder, attempt=restarts))
    return None


def _worker(folder: str, threads: int) -> None:
    """One rank. Its parent is the fork server, which dies with the launcher."""
    die_with_parent(None)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if launcher.is_alive():
        receive_output(Path(folder, SOCKET))
        torch.set_num_threads(threads)
        run_launched(Path(folder))


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
        yield
    finally:
        signal.signal(signal.SIGQUIT, handler)
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.handlers = handlers
