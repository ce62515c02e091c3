"""Local workers for the torch transport: forked from a clean process, watched, and ended together.

Workers are forked from multiprocessing's fork server, a process that has imported torch and computed nothing. A rank
starts in a tenth of a second. A rank forked from the launcher instead could hang in the first parallel operation:
OpenMP's threads do not survive a fork.

The ranks' store is one more process forked from the server, on a port picked by the kernel. So the launcher imports no
torch, which would take a second of a core and 190 MB. If the store or the fork server dies, the job ends at once and
another attempt starts new ones. Ranks get the environment variables of torchrun. (torch's own elastic agent sends
SIGTERM to the survivors of a dead rank, and SIGKILL half a minute later. Our ranks ignore SIGTERM.)
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import _forkserver, ensure_running
from pathlib import Path
from types import ModuleType

from meshwright.ranks.environment import enter_local_rank, server_variables
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.launch.failure import SERVER, STORE, Death, Failure, LastWords, explain_failure, read_reports
from meshwright.ranks.launch.output import SOCKET, last_lines, receive_output, take_early_errors
from meshwright.ranks.launch.session import Session, make_fork_server_folder
from meshwright.ranks.launch.tether import die_with_parent
from meshwright.ranks.launch.worker import Job, run_launched

_LOOPBACK = "127.0.0.1"
_NOBODY_KNOWS = 255
"""multiprocessing's exit code of a process after its fork server has died."""
_SEEN_SECONDS = 1.0
"""Seconds to wait for a parent's death after its children's: children die with the parent, and may be seen first."""


def start_server(job: Job) -> Path:
    """Start the fork server if none runs; the server imports torch and the job's modules in parallel.

    Returns the folder of early stderr files: each worker's stderr before the connection to the launcher's. Raises
    OSError.
    """
    modules = ["meshwright.ranks.launch.preload", "torch.distributed", job.entry.rpartition(":")[0], *job.preload]
    modules = [name for name in modules if not name.endswith(".py")]  # A script is no importable module.
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    errors = make_fork_server_folder()
    with server_variables(errors, sys.path):
        ensure_running()
    return errors


def run_forked(session: Session, num_ranks: int, threads: int, last_words: LastWords, attempt: int) -> Failure | None:
    """Run one attempt of the session's job; return the cause of the failure, None after success."""
    context = multiprocessing.get_context("forkserver")
    try:
        errors = start_server(Job.read(session.folder))
    except OSError as error:
        raise LaunchError(f"no worker can be started: {error}") from error
    server = vars(_forkserver)["_forkserver_pid"]
    here, there = context.Pipe()
    store = context.Process(target=_hold_store, args=(there, server))
    workers: list[ForkServerProcess] = []
    death: Death | None
    try:
        try:
            # multiprocessing restarts a fork server that dies now: the new one needs the same variables.
            with server_variables(errors, sys.path):
                # multiprocessing imports the main script in each child. A rank calls the script's function; the store
                # needs none.
                main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
                try:
                    store.start()
                finally:
                    sys.modules["__main__"] = main
                there.close()
                port = here.recv()
                if isinstance(port, str):
                    raise LaunchError(f"no worker can be started: {port}")
                arguments = (str(session.folder), str(errors), num_ranks, attempt, port, threads, server)
                for rank in range(num_ranks):
                    workers.append(context.Process(target=_work, args=(rank, *arguments)))
                    workers[-1].start()
            death = _watch(workers, store, server)
        except (OSError, EOFError) as error:
            if store.pid is not None:
                store.join(_SEEN_SECONDS)
            ended = store.pid is not None and store.exitcode is not None
            death = _death_of(server) or (Death(STORE, store.exitcode) if ended else None)
            if death is None:
                raise LaunchError(f"no worker can be started: {error}") from error
        if death is not None and isinstance(death.who, int):
            pid = workers[death.who].pid or 0
            words = last_lines(take_early_errors(errors, pid)) or last_words(death.who)
            death = replace(death, words=words)
    finally:
        _end([*workers, store], errors)
    return None if death is None else explain_failure(death, read_reports(session.folder, attempt))


def _death_of(server: int, seconds: float = _SEEN_SECONDS) -> Death | None:
    """Return the fork server's death as soon as the server ends; None if the server lives after `seconds`.

    Does not reap the process, since multiprocessing does before a restart. Status None: multiprocessing has restarted.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return Death(SERVER, None)
        if ended is not None:
            killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return Death(SERVER, -ended.si_status if killed else ended.si_status)
        if time.monotonic() > end:
            return None
        time.sleep(0.001)


def _hold_store(port: Connection, server: int) -> None:
    """Open a store; send the launcher its port, or the error's text. Hold the store open until the pipe closes."""
    die_with_parent(server)
    from meshwright.ranks.listening import listening_store  # imports torch, which the fork server has imported

    try:
        store = listening_store(_LOOPBACK, 0, timedelta(seconds=30))
    except (OSError, RuntimeError) as error:
        port.send(str(error))
        return
    port.send(store.port)
    with suppress(EOFError):
        port.recv()


def _work(
    rank: int, folder: str, errors: str, num_ranks: int, attempt: int, port: int, threads: int, server: int
) -> None:
    """Run one rank. The parent process is the fork server, which dies with the launcher."""
    die_with_parent(server)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if launcher.is_alive():
        enter_local_rank(rank, num_ranks, attempt, port)
        receive_output(Path(folder, SOCKET), rank)
        os.write(2, take_early_errors(Path(errors), os.getpid()))
        import torch  # imported already by the fork server

        torch.set_num_threads(threads)
        run_launched(Path(folder))


def _watch(workers: list[ForkServerProcess], store: ForkServerProcess, server: int) -> Death | None:
    """Wait for ranks; return the first cause among the first deaths seen (ranks, store, fork server).

    Returns None after all ranks have succeeded.
    """
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    while running:
        ended, deaths = wait([*running, store.sentinel]), []
        for sentinel in running.keys() & ended:
            rank = running.pop(sentinel)
            workers[rank].join()
            if status := workers[rank].exitcode:
                deaths.append(Death(rank, status))
        if (running or deaths) and store.sentinel in ended:
            store.join()
            deaths.append(Death(STORE, store.exitcode))
        # Only the fork server knows its children's exit statuses: without the server, multiprocessing reports this.
        if any(death.status == _NOBODY_KNOWS for death in deaths) and (killed := _death_of(server)):
            return killed
        if deaths:
            return min(deaths, key=lambda death: death.order)
    return None


def _end(workers: list[ForkServerProcess], errors: Path) -> None:
    """Kill workers that still run: none can go on without a dead rank, and workers ignore SIGTERM."""
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        worker.kill()
    for worker in started:
        worker.join()
        take_early_errors(errors, worker.pid or 0)  # left if a worker was killed before its connection
        worker.close()
