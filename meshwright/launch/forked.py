"""Local workers for the torch transport: forked from a clean process, watched, and ended together.

Workers are forked from a process that has imported torch and run nothing with it (multiprocessing's fork server): a
rank starts in a tenth of a second. A rank forked from this process instead could hang in its first parallel operation:
OpenMP's threads do not survive a fork.

Ranks meet at a store on a port that the kernel picked, in one more process of the server's: this process imports no
torch, which takes a second of a core and 190 MB. A job whose store dies ends at once. Ranks see the variables that
torchrun would set. (torch's own elastic agent asks the survivors of a dead rank to leave by SIGTERM, which ours ignore,
and waits half a minute before it ends them.)
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import ModuleType

from meshwright.environment import enter_local_rank, server_variables
from meshwright.errors import LaunchError
from meshwright.launch.failure import Death, Failure, LastWords, explain_failure, read_reports, signal_name
from meshwright.launch.output import SOCKET, last_lines, receive_output, take_early_errors
from meshwright.launch.session import Session, make_fork_server_folder
from meshwright.launch.tether import die_with_parent
from meshwright.launch.worker import Job, run_launched

_LOOPBACK = "127.0.0.1"


def start_server(job: Job) -> Path:
    """Start the fork server if none runs; it imports torch and the job's modules while this process goes on.

    Returns the folder for workers' stderr before they are connected to the launcher's. Raises OSError.
    """
    modules = ["meshwright.launch.preload", "torch.distributed", job.entry.rpartition(":")[0], *job.preload]
    modules = [name for name in modules if not name.endswith(".py")]  # a script is none
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    errors = make_fork_server_folder()
    with server_variables(errors, sys.path):
        ensure_running()
    return errors


def run_forked(session: Session, num_ranks: int, threads: int, last_words: LastWords, attempt: int) -> Failure | None:
    """Run an attempt at the session's job; why it failed, None where it succeeded."""
    context = multiprocessing.get_context("forkserver")
    try:
        errors = start_server(Job.read(session.folder))
        here, there = context.Pipe()
        store = context.Process(target=_hold_store, args=(there,))
        # A rank imports the script that is run, for the function that it calls; the store's process needs none of it.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            store.start()
        finally:
            sys.modules["__main__"] = main
        there.close()
        port = here.recv()
    except (OSError, EOFError) as error:
        raise LaunchError(f"no worker can be started: {error or 'the process of their store has died'}") from error
    if isinstance(port, str):
        raise LaunchError(f"no worker can be started: {port}")
    arguments = (str(session.folder), str(errors), num_ranks, attempt, port, threads)
    workers = [context.Process(target=_work, args=(rank, *arguments)) for rank in range(num_ranks)]
    try:
        for worker in workers:
            worker.start()
        death = _watch(workers, store)
        if isinstance(death, Death):
            pid = workers[death.rank].pid or 0
            words = last_lines(take_early_errors(errors, pid)) or last_words(death.rank)
            death = replace(death, words=words)
    finally:
        _end([*workers, store], errors)
    return explain_failure(death, read_reports(session.folder, attempt)) if isinstance(death, Death) else death


def _hold_store(port: Connection) -> None:
    """Tell the launcher the port of a store, or why there is none; hold it open until the launcher is done."""
    die_with_parent(None)
    from meshwright.ranks.listening import listening_store  # imports torch, which the fork server has imported

    try:
        store = listening_store(_LOOPBACK, 0, timedelta(seconds=30))
    except (OSError, RuntimeError) as error:
        port.send(str(error))
        return
    port.send(store.port)
    with suppress(EOFError):
        port.recv()


def _work(rank: int, folder: str, errors: str, num_ranks: int, attempt: int, port: int, threads: int) -> None:
    """One rank. Its parent is the fork server, which dies with the launcher."""
    die_with_parent(None)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if launcher.is_alive():
        enter_local_rank(rank, num_ranks, attempt, port)
        receive_output(Path(folder, SOCKET), rank)
        os.write(2, take_early_errors(Path(errors), os.getpid()))
        import torch  # which the fork server has imported

        torch.set_num_threads(threads)
        run_launched(Path(folder))


def _watch(workers: list[ForkServerProcess], store: ForkServerProcess) -> Death | Failure | None:
    """The first rank seen to fail, killed ranks before ranks that raised; or that the store has ended, which ranks
    would notice at their next checkpoint; None when all ranks have succeeded."""
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    while running:
        ended, deaths = wait([*running, store.sentinel]), []
        for sentinel in running.keys() & ended:
            rank = running.pop(sentinel)
            workers[rank].join()
            if status := workers[rank].exitcode:
                deaths.append(Death(rank, status))
        if deaths:
            return min(deaths, key=lambda death: (death.status > 0, death.rank))
        if running and store.sentinel in ended:
            store.join()
            text = f"the process that holds the ranks' store was killed by {signal_name(-(store.exitcode or 0))}"
            return Failure(text, lost=False)
    return None


def _end(workers: list[ForkServerProcess], errors: Path) -> None:
    """Kill workers that still run: a dead rank leaves them nothing to do, and they ignore SIGTERM."""
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        worker.kill()
    for worker in started:
        worker.join()
        take_early_errors(errors, worker.pid or 0)  # of a worker that was killed before it had the launcher's stderr
        worker.close()
